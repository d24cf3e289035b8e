// B = transpose(A)        float32, row-major        three steps towards kernels/transpose.cu
//
//   A  rows x cols, rows lda elements apart;  B  cols x rows, rows ldb elements apart
//
//   naive        thread (y, x) copies A[y][x] to B[x][y]: a warp reads 128 bytes in a row, and
//                writes 32 elements into 32 rows
//   tiled        through a TILE x TILE tile: rows are read and rows are written, but the 32
//                elements of a column of the tile lie in one bank
//   tiled_free   rows of the tile are padded by one element: a column lies in 32 banks
//
// One block: TILE x TILE elements, TILE x 8 threads, 4 elements each. The grid is one-dimensional
// over tiles.
typedef long long index_t;

constexpr int TILE = 32;
constexpr int TILE_ROWS = 8;

struct Place {
  index_t row, col;
};

__device__ __forceinline__ Place tile_of(index_t block, index_t cols) {
  const index_t tile_cols = (cols + TILE - 1) / TILE;
  return {block / tile_cols * TILE, block % tile_cols * TILE};
}

template <int PITCH>
__device__ __forceinline__ void through_tile(index_t rows, index_t cols, const float* a,
                                             index_t lda, float* b, index_t ldb) {
  __shared__ float tile[TILE][PITCH];
  const Place at = tile_of(blockIdx.x, cols);
  const int x = threadIdx.x % TILE;
  const int y = threadIdx.x / TILE;
#pragma unroll
  for (int i = y; i < TILE; i += TILE_ROWS) {
    if (at.row + i < rows && at.col + x < cols) tile[i][x] = a[(at.row + i) * lda + at.col + x];
  }
  __syncthreads();  // the tile is written before its columns are read
#pragma unroll
  for (int i = y; i < TILE; i += TILE_ROWS) {
    if (at.col + i < cols && at.row + x < rows) b[(at.col + i) * ldb + at.row + x] = tile[x][i];
  }
}

extern "C" __global__ void __launch_bounds__(TILE* TILE_ROWS)
    transpose_naive(index_t rows, index_t cols, const float* __restrict__ a, index_t lda,
                    float* __restrict__ b, index_t ldb) {
  const Place at = tile_of(blockIdx.x, cols);
  const index_t col = at.col + threadIdx.x % TILE;
#pragma unroll
  for (int i = 0; i < TILE; i += TILE_ROWS) {
    const index_t row = at.row + threadIdx.x / TILE + i;
    if (row < rows && col < cols) b[col * ldb + row] = a[row * lda + col];
  }
}

extern "C" __global__ void __launch_bounds__(TILE* TILE_ROWS)
    transpose_tiled(index_t rows, index_t cols, const float* __restrict__ a, index_t lda,
                    float* __restrict__ b, index_t ldb) {
  through_tile<TILE>(rows, cols, a, lda, b, ldb);
}

extern "C" __global__ void __launch_bounds__(TILE* TILE_ROWS)
    transpose_tiled_free(index_t rows, index_t cols, const float* __restrict__ a, index_t lda,
                         float* __restrict__ b, index_t ldb) {
  through_tile<TILE + 1>(rows, cols, a, lda, b, ldb);
}
