// The elements of a matrix, numbered row by row: where a thread is that goes on by STEP at a time.
//
// Narrow matrices keep as many threads busy as wide ones; that costs a division for each thread, and
// another one where a step leaves the row.
#pragma once

#include "common/index.cuh"

// 64 bits take three times as long.
__device__ __forceinline__ index_t quotient(index_t a, index_t b) {
  return (a | b) >> 32 ? a / b : static_cast<unsigned>(a) / static_cast<unsigned>(b);
}

template <int STEP>
struct RowWalk {
  index_t row, col;

  __device__ __forceinline__ RowWalk(index_t element, index_t cols)
      : row(quotient(element, cols)), col(element - row * cols) {}

  __device__ __forceinline__ void go_on(index_t cols) {
    col += STEP;
    if (col < cols) return;
    const index_t rows = quotient(col, cols);
    row += rows;
    col -= rows * cols;
  }
};
