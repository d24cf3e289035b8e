// How the threads of split_pack.cu bring a tile of float32 from memory to shared memory, where rows
// lie along k whatever the order in memory: see pack_map.cuh.
#pragma once

#include "common/index.cuh"
#include "common/pack_map.cuh"

__device__ __forceinline__ int line_of(int i) { return line_of_thread(threadIdx.x, i); }

template <bool WIDE>
__device__ __forceinline__ int place_of(int e) {
  return place_in_line(WIDE, threadIdx.x, e);
}

// What is read for the last time need not stay in L2.
template <bool LAST, class T>
__device__ __forceinline__ T load(const T* from) {
  return LAST ? __ldcs(from) : *from;
}

// A thread's piece of the tile that begins at x; `lines` and `width` of it exist, the rest is 0.
template <bool WIDE, bool LAST>
__device__ __forceinline__ void load_piece(float (&piece)[PIECE][PIECE],
                                           const float* __restrict__ x, index_t ld, int lines,
                                           int width) {
  const bool whole = lines == TILE && width == TILE;  // the same in all threads
  const float* const first = x + line_of(0) * ld + place_of<WIDE>(0);
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
    if (WIDE && (whole || (line_of(i) < lines && place_of<WIDE>(PIECE) <= width))) {
      const float4 four = load<LAST>(reinterpret_cast<const float4*>(first + i * ld));
      piece[i][0] = four.x, piece[i][1] = four.y, piece[i][2] = four.z, piece[i][3] = four.w;
    } else {
#pragma unroll
      for (int e = 0; e < PIECE; ++e) {
        const bool there = whole || (line_of(i) < lines && place_of<WIDE>(e) < width);
        const int step = place_of<WIDE>(e) - place_of<WIDE>(0);
        piece[i][e] = there ? load<LAST>(first + i * ld + step) : 0.0f;
      }
    }
  }
}

// An element of the tile in shared memory.
__device__ __forceinline__ float& at(float4* tile, int row, int k) {
  return reinterpret_cast<float*>(tile + shared_place(row, k / PIECE))[k % PIECE];
}

template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ void put_piece(float4* tile, const float (&piece)[PIECE][PIECE]) {
#pragma unroll
  for (int j = 0; j < PIECE; ++j) {
    if (ALONG_K && !WIDE) {
#pragma unroll
      for (int e = 0; e < PIECE; ++e) at(tile, line_of(j), place_of<WIDE>(e)) = piece[j][e];
    } else if (ALONG_K) {
      tile[shared_place(line_of(j), place_of<WIDE>(0) / PIECE)] = {piece[j][0], piece[j][1],
                                                                   piece[j][2], piece[j][3]};
    } else {  // four lines are four neighbours along k
      tile[shared_place(place_of<WIDE>(j), line_of(0) / PIECE)] = {piece[0][j], piece[1][j],
                                                                   piece[2][j], piece[3][j]};
    }
  }
}
