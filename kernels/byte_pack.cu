// Packs an operand of bytes for byte_mma.cu with INTEGER.
//
//   x  rows x k     op(A), or the transpose of op(B); int8, uint8 or bool, stored along k or along its
//                   rows, lines ld bytes apart
//   tiles[slices][R / 64][slabs][64][128]  R = rows rounded up to 128; each slice has so many slabs of
//                   128 k, the last ones with zeros where x has no elements
//
// Element (r, c) of a tile lies at byte 128 r + (c ^ 16 (r % 8)): see common/wgmma.cuh.
//
// A thread block packs a tile. It is turned in shared memory, where rows lie along k, as in
// integer_pack.cu.
//
// Cost: a byte read of each element, and one written.

#include "common/index.cuh"
#include "common/residues.cuh"

constexpr int THREADS = 256, FOUR = 4, PIECE = 16, PIECES = K_OF_TILE / PIECE;
constexpr int PITCH = K_OF_TILE + FOUR;  // of a row in shared memory: columns of it meet other banks

// Four neighbours of a line, of which `left` exist; the rest is 0.
__device__ __forceinline__ unsigned load_four(const unsigned char* __restrict__ from, int left,
                                              bool wide) {
  if (wide && left >= FOUR) return *reinterpret_cast<const unsigned*>(from);
  unsigned four = 0;
#pragma unroll
  for (int e = 0; e < FOUR; ++e) {
    if (e < left) four |= static_cast<unsigned>(from[e]) << 8 * e;
  }
  return four;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    byte_pack(const unsigned char* __restrict__ x, index_t ld, index_t rows, index_t k, int along_k,
              int wide, index_t slabs, unsigned char* __restrict__ tiles) {
  __shared__ __align__(16) unsigned char tile[ROWS_OF_TILE][PITCH];
  const index_t panels = ceil_div(rows, 2 * ROWS_OF_TILE) * 2, number = blockIdx.x;
  const index_t slice = number / (panels * slabs), panel = number / slabs % panels;
  const index_t row0 = panel * ROWS_OF_TILE, k0 = (slice * slabs + number % slabs) * K_OF_TILE;
  const int height = clip(rows - row0 < 0 ? 0 : rows - row0, ROWS_OF_TILE);
  const int depth = clip(k - k0 < 0 ? 0 : k - k0, K_OF_TILE);
  const unsigned char* const from = x + (along_k ? row0 * ld + k0 : k0 * ld + row0);
  const int lines = along_k ? height : depth, width = along_k ? depth : height;
  const int fours = (along_k ? K_OF_TILE : ROWS_OF_TILE) / FOUR;
#pragma unroll
  for (int i = 0; i < ROWS_OF_TILE * K_OF_TILE / FOUR / THREADS; ++i) {
    const int at = threadIdx.x + i * THREADS, line = at / fours, first = at % fours * FOUR;
    const unsigned four = load_four(from + line * ld + first, line < lines ? width - first : 0, wide);
    if (along_k) {
      *reinterpret_cast<unsigned*>(&tile[line][first]) = four;
    } else {
#pragma unroll
      for (int e = 0; e < FOUR; ++e) tile[first + e][line] = four >> 8 * e & 255;
    }
  }
  __syncthreads();
  unsigned char* const to = tiles + number * BYTES_OF_TILE;
#pragma unroll
  for (int i = 0; i < ROWS_OF_TILE * PIECES / THREADS; ++i) {
    const int at = threadIdx.x + i * THREADS, row = at / PIECES, place = at % PIECES;
    const unsigned* const words = reinterpret_cast<const unsigned*>(&tile[row][place * PIECE]);
    *reinterpret_cast<uint4*>(to + row * K_OF_TILE + (place ^ row % 8) * PIECE) =
        uint4{words[0], words[1], words[2], words[3]};
  }
}
