// D = alpha (P0 + P1 + ... + P[count-1]) + beta C        elementwise, float32
//
// The sum is a fixed tree of neighbours, ((P0 + P1) + (P2 + P3)) + P4: the same parts give the
// same bits, whatever the launch. Each sum and each product is rounded on its own.
//
//   P, C, D  rows x cols, row-major, each with its own leading dimension and batch stride
//            (counted in elements); D may be one of the P, or C, element by element
//
// As in BLAS: beta = 0 never reads C (which may then be null), alpha = 0 never reads P.
//
// One thread block owns SPAN = THREADS * VECTOR * UNROLL neighbours of one row; what is contiguous
// as a whole is one row. In an access a warp covers 32 * VECTOR neighbours:
//
//          |<-- THREADS * VECTOR -->|                        |
//          +------------------------+-- UNROLL times - - - - +
//   row    | t0 | t1 | t2 |   ...   | t0 | t1 | t2 |   ...   |  of P0, of P1, ..., of C
//          +------------------------+- - - - - - - - - - - - +
//            VECTOR elements = 16 bytes where all addresses allow it
//
// One kernel adds up to CAPACITY parts, so that few kernels have to be compiled: what is not there
// is neither loaded nor added, which all threads know alike.
//
// Cost: count + 1 elements of traffic for each of D (count + 2 with C), count - 1 additions.
// Before a thread stores anything it has UNROLL * min(count, GROUP) loads on their way.

// What AddConfig.defines() sets. An editor, which sees this file alone, gets these.
#ifdef __CLANGD__
#define CAPACITY 8
#define VECTOR 4
#define UNROLL 1
#define THREADS 256
#endif
#if !defined(CAPACITY) || !defined(VECTOR) || !defined(UNROLL) || !defined(THREADS)
#error "parameters must be defined: see AddConfig.defines()"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"
#include "common/refused.cuh"

// clang-format off
template <int BYTES> struct WordOf;
template <> struct WordOf<4> { using type = unsigned int; };
template <> struct WordOf<8> { using type = unsigned long long; };
template <> struct WordOf<16> { using type = uint4; };
// clang-format on

__host__ __device__ constexpr int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }

constexpr int GROUP = 8;  // parts that a thread loads together: more would cost registers
constexpr int STEP = THREADS * VECTOR;
constexpr int SPAN = STEP * UNROLL;

static_assert(CAPACITY >= 1 && CAPACITY <= 64 && (CAPACITY & (CAPACITY - 1)) == 0,
              "whole trees; 64 * 24 bytes of parameters, every GPU takes 4096");
static_assert(VECTOR * sizeof(float) <= 16 && (VECTOR & (VECTOR - 1)) == 0,
              "one instruction moves 16 bytes, or a power of two of elements below that");

template <int WIDTH>
struct alignas(WIDTH * sizeof(float)) Vector {
  float at[WIDTH];
};

struct Matrix {
  float* first;
  index_t ld, stride;
};

struct Parts {  // by value: the launch carries it, no table in device memory
  Matrix part[CAPACITY];
};

// Where a thread works in every matrix.
struct Place {
  index_t batch, row, col;
};

__device__ __forceinline__ float* at(const Matrix& x, const Place& place) {
  return x.first + (place.batch * x.stride + place.row * x.ld + place.col);
}

// Whole vectors. A cast says how they are aligned, but optimisers may merge such an access with
// those of single elements at the end of a row, and then split it; this word and this function
// they leave.
template <int WIDTH>
__device__ __forceinline__ Vector<WIDTH> load(const Matrix& x, const Place& place) {
  return *static_cast<const Vector<WIDTH>*>(
      __builtin_assume_aligned(at(x, place), alignof(Vector<WIDTH>)));
}

template <int WIDTH>
__device__ __forceinline__ void store(const Matrix& x, const Place& place, Vector<WIDTH> values) {
  using Whole = typename WordOf<sizeof(values)>::type;
  Whole whole;
  memcpy(&whole, &values, sizeof(values));
  __stcg(reinterpret_cast<Whole*>(at(x, place)), whole);
}

// Plain sums: there is nothing that they could be fused with, products are those of mul_rn.
template <int WIDTH>
__device__ __forceinline__ Vector<WIDTH> sum(Vector<WIDTH> x, Vector<WIDTH> y) {
  Vector<WIDTH> s;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) s.at[i] = x.at[i] + y.at[i];
  return s;
}

template <int WIDTH>
__device__ __forceinline__ Vector<WIDTH> scaled(float factor, Vector<WIDTH> x) {
  Vector<WIDTH> s;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) s.at[i] = mul_rn(factor, x.at[i]);
  return s;
}

// The sum of SIZE parts from the first on, a power of two, or of those that there are: their tree is
// what is left of a whole one.
template <int WIDTH, int SIZE>
__device__ __forceinline__ Vector<WIDTH> group(const Parts& parts, int first, int count,
                                               const Place& place) {
  Vector<WIDTH> x[SIZE];
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    if (i == 0 || first + i < count) x[i] = load<WIDTH>(parts.part[first + i], place);
  }
#pragma unroll
  for (int gap = 1; gap < SIZE; gap *= 2) {
#pragma unroll
    for (int i = 0; i + gap < SIZE; i += 2 * gap) {
      if (first + i + gap < count) x[i] = sum(x[i], x[i + gap]);
    }
  }
  return x[0];
}

// The sum of all parts. Groups are added as a binary counter counts: while bit l of their number is
// set, whole[l] is the sum of 2^l of them.
template <int WIDTH, int SIZE>
__device__ __forceinline__ Vector<WIDTH> tree(const Parts& parts, int count, const Place& place) {
  if constexpr (SIZE <= GROUP) {
    return group<WIDTH, SIZE>(parts, 0, count, place);
  } else {
    constexpr int LEVELS = log2_of(SIZE / GROUP);
    Vector<WIDTH> whole[LEVELS], total;
    const int groups = (count + GROUP - 1) / GROUP;
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
      total = group<WIDTH, GROUP>(parts, g * GROUP, count, place);
#pragma unroll
      for (int l = 0; l < LEVELS; ++l) {
        if (((g + 1) & ((2 << l) - 1)) == 1 << l) whole[l] = total;  // bit l is set from now on
        if (g >> l & 1) total = sum(whole[l], total);  // for the next level, or for the end
      }
    }
    return total;
  }
}

// WIDTH neighbouring values of D. alpha and beta are the same in all threads.
template <int WIDTH>
__device__ __forceinline__ Vector<WIDTH> values(float alpha, const Parts& parts, int count,
                                                float beta, const Matrix& c, const Place& place) {
  if (is_zero(beta)) {
    if (is_zero(alpha)) return {};
    return scaled(alpha, tree<WIDTH, CAPACITY>(parts, count, place));
  }
  const Vector<WIDTH> addend = scaled(beta, load<WIDTH>(c, place));
  if (is_zero(alpha)) return addend;
  return sum(scaled(alpha, tree<WIDTH, CAPACITY>(parts, count, place)), addend);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_partials(index_t cols, float alpha, float beta, index_t count, Parts parts, Matrix c,
                 Matrix d
#ifdef GUARDED  // needed only if packing finds that REFUSED is the way: common/refused.cuh
                 ,
                 const unsigned long long* __restrict__ counts
#endif
    ) {
#ifdef GUARDED
  if (way_of(counts, GUARDED) != REFUSED) return;
#endif
  if (count < 1) __builtin_unreachable();  // ptxas spills for sm_120 unless it knows
  // 32-bit division: the grid bounds the number of spans.
  const unsigned spans = static_cast<unsigned>(ceil_div(cols, SPAN));
  const index_t row = blockIdx.x / spans;
  const index_t col0 = static_cast<index_t>(blockIdx.x % spans) * SPAN;
  const int lane = static_cast<int>(threadIdx.x) * VECTOR;
  Place place = {static_cast<index_t>(blockIdx.z), row, col0 + lane};

  if (cols - col0 >= SPAN) {
    // D may be a part, so no compiler moves loads over stores: all loads first.
    Vector<VECTOR> total[UNROLL];
    Place next = place;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u, next.col += STEP) {
      total[u] = values<VECTOR>(alpha, parts, count, beta, c, next);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u, place.col += STEP) store(d, place, total[u]);
    return;
  }
  for (; place.col < cols; place.col += STEP) {  // the end of a row; at most UNROLL times
    if (place.col + VECTOR <= cols) {
      store(d, place, values<VECTOR>(alpha, parts, count, beta, c, place));
    } else {
      for (Place one = place; one.col < cols; ++one.col) {
        store(d, one, values<1>(alpha, parts, count, beta, c, one));
      }
    }
  }
}
