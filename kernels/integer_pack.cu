// Packs an operand of narrow integers for sgemm_split.cu and sgemm_split_mma.cu with INTEGER.
//
//   x  rows x k            op(A), or the transpose of op(B); stored along k or along its rows,
//                          lines ld elements apart, at any address of an element
//   tiles[R/64][S][64][64] float16, R = rows rounded up to 128 and S = ceil(k / 64) slabs; zeros
//                          where x has no elements. Integers up to 2^11 are FP16 numbers as they are
//
// Element (r, c) of a tile lies at byte 128 r + (2 c ^ 16 (r % 8)), as in split_pack.cu.
//
// A thread block packs a tile. It is turned in shared memory, where rows lie along k:
//
//   memory, 64 lines           shared memory, 64 rows of 33 words      tile
//   t reads 4 neighbours  -->  [ k 0 1 | 2 3 | .. | 62 63 | - ]   -->  t writes 8 neighbours along k,
//   (WIDE: in one load)                                                16 bytes
//
// Cost: BYTES read of each element, and 2 written.

// What multimm/gpu/integers/tensor_cores.py sets; an editor, which sees this file alone, gets int8.
#ifdef __CLANGD__
#define BYTES 1
#define SIGNED 1
#endif
#if !defined(BYTES) || !defined(SIGNED)
#error "BYTES and SIGNED must be defined: see multimm.gpu.integers.tensor_cores"
#endif

#include "common/index.cuh"
#include "common/split.cuh"

static_assert(BYTES == 1 || BYTES == 2, "int8, uint8 or bool; int16 or uint16");

#if BYTES == 1 && SIGNED
typedef signed char element_t;
#elif BYTES == 1
typedef unsigned char element_t;
#elif SIGNED
typedef short element_t;
#else
typedef unsigned short element_t;
#endif

constexpr int TILE = 64, THREADS = 256, FOUR = 4, EIGHT = 8;
constexpr int PITCH = TILE + 2;  // of a row in shared memory: columns of it meet other banks

struct alignas(FOUR * BYTES) Four {
  element_t of[FOUR];
};

// Four neighbours of a line, of which `left` exist; the rest is 0.
template <bool WIDE>
__device__ __forceinline__ Four load_four(const element_t* __restrict__ from, int left) {
  Four four;
  if (WIDE && left >= FOUR) return *reinterpret_cast<const Four*>(from);
#pragma unroll
  for (int e = 0; e < FOUR; ++e) four.of[e] = e < left ? from[e] : element_t(0);
  return four;
}

template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ void pack(const element_t* __restrict__ x, index_t ld, int rows, int k,
                                     short (&tile)[TILE][PITCH]) {
  const int lines = ALONG_K ? rows : k, width = ALONG_K ? k : rows;
#pragma unroll
  for (int i = 0; i < TILE * TILE / FOUR / THREADS; ++i) {
    const int number = threadIdx.x + i * THREADS;
    const int line = number / (TILE / FOUR), at = number % (TILE / FOUR) * FOUR;
    const Four four = load_four<WIDE>(x + line * ld + at, line < lines ? width - at : 0);
#pragma unroll
    for (int e = 0; e < FOUR; ++e) {
      short& to = ALONG_K ? tile[line][at + e] : tile[at + e][line];
      to = static_cast<short>(four.of[e]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    integer_pack(const element_t* __restrict__ x, index_t ld, index_t rows, index_t k, int along_k,
                 int wide, unsigned short* __restrict__ tiles) {
  __shared__ __align__(16) short tile[TILE][PITCH];
  const index_t slabs = ceil_div(k, TILE);
  const index_t row0 = blockIdx.x / slabs * TILE, k0 = blockIdx.x % slabs * TILE;
  const int height = clip(rows - row0 < 0 ? 0 : rows - row0, TILE), depth = clip(k - k0, TILE);
  const element_t* const from = x + (along_k ? row0 * ld + k0 : k0 * ld + row0);
  if (along_k && wide) {
    pack<true, true>(from, ld, height, depth, tile);
  } else if (along_k) {
    pack<true, false>(from, ld, height, depth, tile);
  } else if (wide) {
    pack<false, true>(from, ld, height, depth, tile);
  } else {
    pack<false, false>(from, ld, height, depth, tile);
  }
  __syncthreads();
  unsigned short* const to = tiles + static_cast<index_t>(blockIdx.x) * (TILE * TILE);
#pragma unroll
  for (int i = 0; i < TILE * TILE / EIGHT / THREADS; ++i) {
    const int number = threadIdx.x + i * THREADS;
    const int row = number / (TILE / EIGHT), piece = number % (TILE / EIGHT);
    unsigned pairs[EIGHT / 2];
#pragma unroll
    for (int e = 0; e < EIGHT / 2; ++e) {
      const short* const two = &tile[row][piece * EIGHT + 2 * e];
      pairs[e] = halves(static_cast<float>(two[0]), static_cast<float>(two[1]));
    }
    *reinterpret_cast<uint4*>(to + row * TILE + (piece ^ row % EIGHT) * EIGHT) =
        uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}
