// D = alpha * (2^(ea + eb) * A * B' + P) + beta * C      packed operands, float32 sums, sm_80 on
//
// What sgemm_split.cu computes, with its arguments, its operands and its order of sums, on tensor
// cores that read their factors from registers: those of all GPUs from sm_80 on. On an H200 the
// bits are the same; other generations of tensor cores cut sums off at other places.
//
// A thread block computes tiles of 128 x TILE_N, one after the other: eight warps, two by four,
// 64 x WARP_N of it each. A stage has 32 k of all parts:
//
//            TILE_N            stage:  high parts: A rows 0-127 | B rows 0 - (TILE_N - 1) | low parts
//      +---+---+---+---+
//   64 | 0 | 1 | 2 | 3 |       global --(copies of 16 bytes)--> stage --(load_pieces)--> registers
//      +---+---+---+---+
//   64 | 4 | 5 | 6 | 7 |       A row is 64 bytes, four pieces: piece p of row r lies where piece
//      +---+---+---+---+       p ^ (r / 2 % 4) would, so that eight rows' pieces meet no bank twice.
//       WARP_N
//
// With INTEGER defined sums are integers, as there.
//
// One barrier for each stage: behind it the stage that is multiplied next has landed, and all warps
// have read the one before, whose place the copies of SLOTS - 1 stages later may take. They are
// issued while the tensor cores are busy, and run ahead into the next tile of D while this one is
// stored.
//
// Of `fresh` (see sgemm_split.cu) a warp has that of 16 rows at a time, and `total` and `small` of
// all its rows: 144 of 255 registers, TILE_N 128, PARTS 2. With PARTS 1, TILE_N 256, sums and what
// is put aside take 192.
//
// On an H200, 8192, operands packed before, sustained at the power limit: 111 TFLOP/s at 1890 MHz,
// and 315 in tf32 (recorded). It was measured on H200s alone. In trials copies behind the barrier,
// before the first products, took 6 % longer. No faster: the next rows of A loaded ahead, `fresh` of
// all rows at a time; 5 or 7 slots in place of 3. Slower: the next stage's B loaded before the
// barrier (-13 %, its registers spill).

// What SplitConfig.defines() sets; an editor, which sees this file alone, gets "mma_wide".
#ifdef __CLANGD__
#define PARTS 2
#define TILE_N 128
#define SLOTS 3
#define BAND 8
#define CAP 1024
#endif
#if !defined(PARTS) || !defined(TILE_N) || !defined(SLOTS) || !defined(BAND) || !defined(CAP)
#error "PARTS, TILE_N, SLOTS, BAND and CAP must be defined: see SplitConfig.defines()"
#endif

#include "common/async_copy.cuh"
#include "common/index.cuh"
#include "common/mma.cuh"
#include "common/refused.cuh"
#include "common/split_aside.cuh"
#include "common/split_finish.cuh"
#include "common/split_integer.cuh"
#include "common/split_tiles.cuh"

constexpr int DEPTH = 32, ROW_BYTES = DEPTH * 2;  // k of a stage, and bytes of a row of it
constexpr int PIECES = ROW_BYTES / 16, HALF_ROW = SLAB;  // of a stage; bytes of half a packed row
constexpr int WARPS_M = 2, WARPS_N = 4, THREADS = WARPS_M * WARPS_N * 32;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr int M_TILES = WARP_M / 16, N_TILES = WARP_N / 8;  // products of the tensor cores
constexpr int SUMS = 4 * N_TILES;                           // of a thread, in 16 rows
constexpr int PART_BYTES = (TILE_M + TILE_N) * ROW_BYTES, STAGE_BYTES = PARTS * PART_BYTES;

// Packed rows come in multiples of 128, so of two tiles that follow each other both are stored.
constexpr int PAIRS_OF_TILES = 1 + (B_TILES + 1) / 2;

static_assert(B_TILES == 1 || B_TILES % 2 == 0, "B is copied by pairs of packed tiles, or one");
static_assert(THREADS == TILE_ROWS * PIECES, "a thread copies a piece of each packed tile");
static_assert(WARP_N % 16 == 0, "B is read 16 rows at a time");
static_assert(SLOTS >= 2, "a stage is copied while another one is multiplied");

// Whatever operands fit a GPU's memory have fewer than 2^30 slabs.
__device__ __forceinline__ int slabs_of(const Work& work, unsigned item) {
  return static_cast<int>(work.slab_count(item));
}

// What a thread copies, stage after stage of one tile of D after the other.
struct Feed {
  const char* from[PAIRS_OF_TILES];  // this thread's piece of the next stage, in every second tile
  int left;                          // stages of this tile of D
  unsigned item;
  bool second;  // half of a slab

  // Find the next tile that has anything to multiply, from `item` on.
  __device__ __forceinline__ void begin(const Work& work, const Packed& a, const Packed& b) {
    left = 0;
    second = false;
    if (item >= work.count()) return;
    left = 2 * slabs_of(work, item);
    const TileIndex tile = work.tile(item);
    const index_t first = work.first_slab(item);
#pragma unroll
    for (int i = 0; i < PAIRS_OF_TILES; ++i) {
      index_t of_b = tile.col * B_TILES + 2 * (i - 1);
      if (i > 1 && of_b > b.last) of_b = b.last - 1;  // the last pair stands in for those beyond
      from[i] = (i == 0 ? a.at(tile.row * A_TILES, first) : b.at(of_b, first)) +
                row() * (2 * ROW_BYTES) + place();
    }
  }

  // Copy the next stage; packed rows of tiles lie `apart` bytes apart.
  __device__ __forceinline__ void copy(shared_t stage, index_t apart) {
    const shared_t to = stage + row() * ROW_BYTES + (threadIdx.x % PIECES ^ row() / 2 % 4) * 16;
#pragma unroll
    for (int i = 0; i < A_TILES + B_TILES; ++i) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        copy_async<16, 0, 0>(to + part * PART_BYTES + i * TILE_ROWS * ROW_BYTES,
                             from[i / 2] + i % 2 * apart + part * TILE_BYTES, left > 0);
      }
    }
    commit_copies();  // also of nothing: groups are counted
  }

  // Go on to the stage after that.
  __device__ __forceinline__ void next(const Work& work, const Packed& a, const Packed& b) {
    if (left <= 0) return;
    // Of a packed row the halves lie 64 bytes apart, but which comes first?
    const int other = place() & ROW_BYTES ? -ROW_BYTES : ROW_BYTES;
#pragma unroll
    for (int i = 0; i < PAIRS_OF_TILES; ++i) from[i] += second ? PARTS * TILE_BYTES - other : other;
    second = !second;
    if (--left == 0) {
      item += gridDim.x;
      begin(work, a, b);
    }
  }

 private:
  __device__ __forceinline__ static int row() { return threadIdx.x / PIECES; }
  // Of this thread's piece in the first half of a packed row.
  __device__ __forceinline__ static int place() {
    return (threadIdx.x % PIECES ^ row() % 8) * 16;
  }
};

// Stages in shared memory, and where a lane finds its pieces in the first one.
struct Ring {
  shared_t stages, a, b;
  int reading;  // the stage that is multiplied next

  __device__ __forceinline__ explicit Ring(const void* memory)
      : stages(shared_address(memory)), reading(0) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row_a = warp / WARPS_N * WARP_M + lane % 16;
    const int row_b = warp % WARPS_N * WARP_N + lane / 16 * 8 + lane % 8;
    a = stages + row_a * ROW_BYTES + (lane / 16 ^ row_a / 2 % 4) * 16;
    b = stages + (TILE_M + row_b) * ROW_BYTES + (lane / 8 % 2 ^ row_b / 2 % 4) * 16;
  }
  __device__ __forceinline__ shared_t at(int stage) const {
    return stages + (stage < SLOTS ? stage : stage - SLOTS) * STAGE_BYTES;
  }
  // Of 16 rows, and 16 k: pieces are in places 0 and 1, or 2 and 3, of four.
  __device__ __forceinline__ static shared_t piece(shared_t first, int rows, int k, int part) {
    return (first + part * PART_BYTES + rows * 16 * ROW_BYTES) ^ k * 32;
  }
  __device__ __forceinline__ shared_t of_a() const { return a + reading * STAGE_BYTES; }
  __device__ __forceinline__ shared_t of_b() const { return b + reading * STAGE_BYTES; }
};

// The stages of all tiles of a thread block, one after the other.
struct Stages {
  Ring ring;
  Feed feed;
  const Work& work;
  const Packed &a, &b;

  __device__ __forceinline__ void begin() {
    feed.item = blockIdx.x;
    feed.begin(work, a, b);
#pragma unroll
    for (int stage = 0; stage < SLOTS - 1; ++stage) copy_to(stage);
  }
  // Wait for the next stage.
  __device__ __forceinline__ void enter() {
    wait_copies<SLOTS - 2>();
    __syncthreads();
  }
  // Copy to the place of the stage before, which all warps have read.
  __device__ __forceinline__ void copy() { copy_to(ring.reading + SLOTS - 1); }
  __device__ __forceinline__ void copy_to(int stage) {
    feed.copy(ring.at(stage), a.slabs * (PARTS * TILE_BYTES));
    feed.next(work, a, b);
  }
  __device__ __forceinline__ void leave() {
    ring.reading = ring.reading + 1 < SLOTS ? ring.reading + 1 : 0;
  }
};

#if PARTS == 1
// total += A * B' of a stage.
__device__ __forceinline__ void multiply_stage(float (&total)[M_TILES][SUMS], Stages& stages) {
  const shared_t a = stages.ring.of_a(), b = stages.ring.of_b();
#pragma unroll
  for (int k = 0; k < DEPTH / 16; ++k) {
    unsigned right[N_TILES / 2][4];
#pragma unroll
    for (int j = 0; j < N_TILES / 2; ++j) load_pieces(right[j], Ring::piece(b, j, k, 0));
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      unsigned left[4];
      load_pieces(left, Ring::piece(a, i, k, 0));
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
        multiply(&total[i][4 * j], left, &right[j / 2][j % 2 * 2], true);
      }
      if (i == 0 && k == 0) stages.copy();
    }
  }
}
#else
// total += hi hi' of a stage; small += lo hi' + hi lo'
__device__ __forceinline__ void multiply_stage(float (&total)[M_TILES][SUMS],
                                               float (&small)[M_TILES][SUMS],
                                               Stages& stages) {
  const shared_t a = stages.ring.of_a(), b = stages.ring.of_b();
  unsigned right[DEPTH / 16][2][N_TILES / 2][4];
#pragma unroll
  for (int k = 0; k < DEPTH / 16; ++k) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int j = 0; j < N_TILES / 2; ++j) {
        load_pieces(right[k][part][j], Ring::piece(b, j, k, part));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < M_TILES; ++i) {
    float fresh[SUMS];
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
      unsigned hi[4], lo[4];
      load_pieces(hi, Ring::piece(a, i, k, 0));
      load_pieces(lo, Ring::piece(a, i, k, 1));
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
        multiply(&fresh[4 * j], hi, &right[k][0][j / 2][j % 2 * 2], k > 0);
      }
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
        multiply(&small[i][4 * j], lo, &right[k][0][j / 2][j % 2 * 2], true);
      }
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
        multiply(&small[i][4 * j], hi, &right[k][1][j / 2][j % 2 * 2], true);
      }
    }
    if (i == 0) stages.copy();  // while the tensor cores are busy
#pragma unroll
    for (int j = 0; j < SUMS; ++j) total[i][j] += fresh[j];
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sgemm_split_mma(index_t m, index_t n, index_t slabs, index_t slab_step, float alpha, float beta,
                    const char* __restrict__ a_tiles, const int* __restrict__ ea,
                    const char* __restrict__ b_tiles, const int* __restrict__ eb,
                    const float* __restrict__ c, index_t ldc, const sum_t* __restrict__ p,
                    index_t ldp, sum_t* __restrict__ d, index_t ldd, index_t stride_d,
                    const unsigned long long* __restrict__ counts
#ifdef INTEGER
                    , index_t promote, int as_float
#endif
    ) {
  if (way_of(counts, CAP) != CARRIED) return;
  extern __shared__ __align__(128) char memory[];
  if (beta == 0.0f) c = nullptr;
  if (alpha == 0.0f) p = nullptr;
  const Work work = work_of(m, n, slabs, slab_step, alpha);
  const Packed a = packed_of(a_tiles, m, slabs), b = packed_of(b_tiles, n, slabs);
  Stages stages{Ring(memory), Feed(), work, a, b};
  stages.begin();

  const auto finish_of = [&](unsigned item, int i) {
    // Computed where it is used: in the loops there are no registers to keep it in.
    asm volatile("" : "+r"(item));
    const TileIndex tile = work.tile(item);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const index_t row = tile.row * TILE_M + warp / WARPS_N * WARP_M + i * 16 + lane / 4;
    const index_t col = tile.col * TILE_N + warp % WARPS_N * WARP_N + lane % 4 * 2;
#ifdef INTEGER
    return FinishIntegers<SUMS>{p ? p + row * ldp + col : nullptr,
                                d + work.slice(item) * stride_d + row * ldd + col,
                                ldp,
                                ldd,
                                clip(m - row, TILE_M),
                                clip(n - col, WARP_N),
                                as_float != 0};
#else
    const bool read = alpha != 0.0f;
    return Finish<SUMS>{read ? ea + row : nullptr,
                        read ? eb + col : nullptr,
                        c ? c + row * ldc + col : nullptr,
                        p ? p + row * ldp + col : nullptr,
                        d + work.slice(item) * stride_d + row * ldd + col,
                        ldc,
                        ldp,
                        ldd,
                        clip(m - row, TILE_M),
                        clip(n - col, WARP_N),
                        alpha,
                        beta};
#endif
  };

#pragma unroll 1
  for (unsigned item = blockIdx.x; item < work.count(); item += gridDim.x) {
    float total[M_TILES][SUMS] = {};
#ifdef INTEGER
    int sums[M_TILES][SUMS] = {};
#pragma unroll 1
    for (index_t left = slabs_of(work, item); left > 0; left -= promote) {
#pragma unroll 1
      for (int i = 2 * static_cast<int>(left < promote ? left : promote); i > 0;
           --i, stages.leave()) {
        stages.enter();
        multiply_stage(total, stages);
      }
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) take_integers(sums[i], total[i]);
    }
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) finish_of(item, i).store(sums[i]);
#else
#if PARTS == 1
    unsigned aside[M_TILES][SUMS / 2] = {};
#pragma unroll 1
    for (int left = slabs_of(work, item); left > 0; left -= PROMOTE) {
#pragma unroll 1
      for (int i = 2 * min(left, PROMOTE); i > 0; --i, stages.leave()) {
        stages.enter();
        multiply_stage(total, stages);
      }
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        take_back(total[i], aside[i]);
        if (left > PROMOTE) put_aside(total[i], aside[i]);
      }
    }
#else
    bool kept = false;
#pragma unroll 1
    for (int left = slabs_of(work, item); left > 0; left -= FLUSH) {
      const int count = min(left, FLUSH);
#pragma unroll 1
      for (int done = 0; done < count; done += FOLD) {
        float small[M_TILES][SUMS] = {};
#pragma unroll 1
        for (int i = 2 * min(count - done, FOLD); i > 0; --i, stages.leave()) {
          stages.enter();
          multiply_stage(total, small, stages);
        }
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
          for (int j = 0; j < SUMS; ++j) total[i][j] = fmaf(small[i][j], 1.0f / 2048, total[i][j]);
        }
      }
      const bool more = left > FLUSH;
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        if (kept) finish_of(item, i).add_kept(total[i]);
        if (more) finish_of(item, i).keep(total[i]);
#pragma unroll
        for (int j = 0; j < SUMS; ++j) total[i][j] = more ? 0.0f : total[i][j];
      }
      kept = more;
    }
#endif
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      if (p || c) {
        finish_of(item, i).template store<false>(total[i]);
      } else {
        finish_of(item, i).template store<true>(total[i]);
      }
    }
#endif
  }
}
