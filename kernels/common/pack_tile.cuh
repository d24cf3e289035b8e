// How the threads of split_pack.cu bring a tile of float32 from memory to shared memory, where rows
// lie along k whatever the order in memory: see pack_map.cuh.
//
// A thread copies a piece of a tile, of 4 x 4 elements, and is the first one that looks at it. Where
// 16 bytes of memory are 4 rows, it turns the piece then: memory lines are k, shared ones are rows.
#pragma once

#include "common/async_copy.cuh"
#include "common/index.cuh"
#include "common/pack_map.cuh"
#include "common/shared_address.cuh"

__device__ __forceinline__ int line_of(int i) { return line_of_thread(threadIdx.x, i); }

template <bool WIDE>
__device__ __forceinline__ int place_of(int e) {
  return place_in_line(WIDE, threadIdx.x, e);
}

// Four neighbours along k of a row; `TURNED`: they were four rows in memory, 16 bytes of each k.
template <bool TURNED>
__device__ __forceinline__ int place_of_four(int row, int four) {
  return TURNED ? turned_place(row, four) : shared_place(row, four);
}

// An element of a tile.
template <bool TURNED>
__device__ __forceinline__ float& at(float4* tile, int row, int k) {
  return reinterpret_cast<float*>(tile + place_of_four<TURNED>(row, k / PIECE))[k % PIECE];
}

// Where a thread's i-th line has its e-th element, of the tile as it comes.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ float& element(float4* tile, int i, int e) {
  const int line = line_of(i), place = place_of<WIDE>(e);
  if (ALONG_K) return at<false>(tile, line, place);
  if (!WIDE) return at<false>(tile, place, line);
  // What will be row place_of(i) and k line_of(0) to line_of(3).
  return reinterpret_cast<float*>(tile + turned_place(place_of<WIDE>(i), line_of(0) / PIECE))[e];
}

// Begin to copy a thread's piece of the tile at x, of which `lines` and `width` exist; the rest is 0.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ void copy_piece(float4* tile, const float* __restrict__ x, index_t ld,
                                           int lines, int width) {
  const bool whole = lines == TILE && width == TILE;  // the same in all threads
  const float* const first = x + line_of(0) * ld + place_of<WIDE>(0);
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
    const float* const from = first + i * ld;
    if (WIDE && (whole || (line_of(i) < lines && place_of<WIDE>(PIECE) <= width))) {
      copy_async<16, 0, 0>(shared_address(&element<ALONG_K, WIDE>(tile, i, 0)),
                           reinterpret_cast<const char*>(from), true);
      continue;
    }
#pragma unroll
    for (int e = 0; e < PIECE; ++e) {
      float& to = element<ALONG_K, WIDE>(tile, i, e);
      const bool there = whole || (line_of(i) < lines && place_of<WIDE>(e) < width);
      const int step = place_of<WIDE>(e) - place_of<WIDE>(0);
      copy_async<4, 0, 0>(shared_address(&to), reinterpret_cast<const char*>(from + step), there);
      if (!there) to = 0.0f;
    }
  }
}

// What this thread has copied, line by line; it lies along k from then on.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ void take_piece(float (&piece)[PIECE][PIECE], float4* tile) {
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
    if (WIDE) {
      const float4 four = reinterpret_cast<const float4&>(element<ALONG_K, WIDE>(tile, i, 0));
      piece[i][0] = four.x, piece[i][1] = four.y, piece[i][2] = four.z, piece[i][3] = four.w;
    } else {
#pragma unroll
      for (int e = 0; e < PIECE; ++e) piece[i][e] = element<ALONG_K, WIDE>(tile, i, e);
    }
  }
  if (ALONG_K || !WIDE) return;
#pragma unroll
  for (int j = 0; j < PIECE; ++j) {
    reinterpret_cast<float4&>(element<ALONG_K, WIDE>(tile, j, 0)) = {piece[0][j], piece[1][j],
                                                                     piece[2][j], piece[3][j]};
  }
}
