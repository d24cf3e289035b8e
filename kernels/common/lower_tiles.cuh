// The tiles of a square D that reach its diagonal or lie below it, numbered in the order of work.
//
//     0  .  .  .  .     Square tiles, bands of 2 rows. Bands are walked column by column, as all
//     1  2  .  .  .     of D would be (see index.cuh); a tile above the diagonal, a dot, has no
//     3  5  7  .  .     number.
//     4  6  8  9  .
//    10 11 12 13 14
//
// Finding a tile costs a few operations for each row of tiles above it: nothing beside its work.
#pragma once

#include "common/index.cuh"

template <int HEIGHT, int WIDTH, int BANDED>  // of a tile, and rows of tiles in a band
struct LowerTiles {
  unsigned rows, cols;  // of tiles, in all of D

  __device__ __forceinline__ unsigned count() const { return size(0, rows); }

  __device__ __forceinline__ TileIndex at(unsigned number) const {
    unsigned above = 0;
    for (unsigned band = size(0, end_of(0)); number >= band; band = size(above, end_of(above))) {
      number -= band;
      above = end_of(above);
    }
    const unsigned below = end_of(above), all = width(above);  // columns that every row has
    if (number < all * (below - above)) {
      return {above + number % (below - above), number / (below - above)};
    }
    number -= all * (below - above);
    unsigned col = all, first = first_row(col);
    while (number >= below - first) {
      number -= below - first;
      first = first_row(++col);
    }
    return {first + number, col};
  }

 private:
  __device__ __forceinline__ unsigned width(unsigned row) const {
    const unsigned reach = ((row + 1) * HEIGHT + WIDTH - 1) / WIDTH;
    return reach < cols ? reach : cols;
  }
  __device__ __forceinline__ unsigned size(unsigned above, unsigned below) const {
    unsigned sum = 0;
    for (unsigned row = above; row < below; ++row) sum += width(row);
    return sum;
  }
  __device__ __forceinline__ unsigned end_of(unsigned above) const {
    return rows - above < BANDED ? rows : above + BANDED;
  }
  // The first row that has a tile in a column.
  __device__ __forceinline__ unsigned first_row(unsigned col) const { return col * WIDTH / HEIGHT; }
};
