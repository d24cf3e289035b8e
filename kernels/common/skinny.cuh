// What sgemm_dot.cu and sgemm_axpy.cu share: how the narrow operand gets to shared memory, and what
// becomes of a sum.
//
// Both see their product as X * Y with few columns: as op(A) * op(B), or, where D has few rows, as
// op(B)' * op(A)' = D'. Then TURNED is 1, and P, C and D lie as the transposes of what is computed.
#pragma once

constexpr bool Y_ALONG_K = TURNED ? !TRANS_A : TRANS_B;

// Chunk after chunk of Y, CHUNK long in k and all of its columns wide, on its way to shared memory,
// where element (k, j) is at slot(k, j). Beyond k, and from column n to COLS, it is 0.
class NarrowOperand {
 public:
  static __device__ __forceinline__ int slot(int k, int j) { return k * PITCH_K + j * PITCH_J; }

  // `y` is the chunk's first element; `left` of its k exist.
  __device__ __forceinline__ void load(const float* y, index_t ldy, int left, int n) {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int k = k_of(i), j = j_of(i);
      words_[i] = 0.0f;
      if (k < left && j < n) words_[i] = y[Y_ALONG_K ? j * ldy + k : k * ldy + j];
    }
  }

  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      if (CHUNK * COLS % THREADS == 0 || element(i) < CHUNK * COLS) {
        to[slot(k_of(i), j_of(i))] = words_[i];
      }
    }
  }

 private:
  static constexpr int COPIES = (CHUNK * COLS + THREADS - 1) / THREADS;  // of each thread

  static __device__ __forceinline__ int element(int i) {
    return static_cast<int>(threadIdx.x) + i * THREADS;
  }
  static __device__ __forceinline__ int k_of(int i) {
    return Y_ALONG_K ? element(i) % CHUNK : element(i) / COLS;
  }
  static __device__ __forceinline__ int j_of(int i) {
    return Y_ALONG_K ? element(i) / CHUNK : element(i) % COLS;
  }

  float words_[COPIES];
};

// What the rows of D are made of besides the product; pointers are at the first of them.
struct Finish {
  const float* c;
  const float* p;
  float* d;
  index_t ldc, ldp, ldd;
  float alpha, beta;

  static __device__ __forceinline__ index_t offset(index_t i, index_t j, index_t ld) {
    return TURNED ? j * ld + i : i * ld + j;
  }

  __device__ __forceinline__ void store(int i, int j, float sum) const {
    if (p) sum = add_rn(sum, p[offset(i, j, ldp)]);
    const float old = c ? mul_rn(beta, c[offset(i, j, ldc)]) : 0.0f;
    d[offset(i, j, ldd)] = c ? fma_rn(alpha, sum, old) : mul_rn(alpha, sum);
  }
};

// The arguments of a launch that concern D, for its rows from `row` on.
__device__ __forceinline__ Finish finish_at(index_t row, index_t batch, index_t k, float alpha,
                                            float beta, const float* c, index_t ldc,
                                            index_t stride_c, const float* p, index_t ldp,
                                            index_t stride_p, float* d, index_t ldd,
                                            index_t stride_d) {
  if (is_zero(beta)) c = nullptr;
  if (is_zero(alpha)) p = nullptr;
  if (k == 0 && !p) alpha = 0.0f;  // an infinite alpha times nothing is nothing
  if (c) c += batch * stride_c + Finish::offset(row, 0, ldc);
  if (p) p += batch * stride_p + Finish::offset(row, 0, ldp);
  d += batch * stride_d + Finish::offset(row, 0, ldd);
  return {c, p, d, ldc, ldp, ldd, alpha, beta};
}
