// Rectangles of memory, each copied to another place; up to CAPACITY of them in one launch.
//
//   piece   rows x cols words, rows a pitch apart, which counts bytes and has any sign or is 0.
//           A word has 16 bytes where addresses, pitches and the length of a row allow it, else 8,
//           4, 2 or 1: each piece says. No target overlaps another one, or a source.
//
// The words of a piece are numbered row by row, and a thread block copies SPAN = THREADS * UNROLL
// of them, so that narrow pieces keep as many threads busy as wide ones. Blocks are dealt out to
// pieces in their order; `first` is the number of a piece's first block:
//
//   blocks   0    1    2    3    4    5    6       pieces of 3, 1 and 3 blocks: first = 0, 3, 4
//          +--------------+----+--------------+
//          |   piece 0    | 1  |   piece 2    |    words of a block: | t0 t1 ... | t0 t1 ... | ...
//          +--------------+----+--------------+                       <-THREADS-> UNROLL times
//
// Cost: each byte is read and written once; a division for each thread, and six comparisons for
// the block's piece. A thread has UNROLL loads on their way before it stores.

// What multimm/gpu/elementwise/batched_copy.py sets. An editor, which sees this file alone, gets these.
#ifdef __CLANGD__
#define CAPACITY 60
#define THREADS 256
#define UNROLL 4
#endif
#if !defined(CAPACITY) || !defined(THREADS) || !defined(UNROLL)
#error "CAPACITY, THREADS and UNROLL must be defined: see multimm/gpu/elementwise/batched_copy.py"
#endif

#include "common/index.cuh"
#include "common/row_walk.cuh"

constexpr int SPAN = THREADS * UNROLL;

struct Piece {
  const char* source;
  char* target;
  index_t source_pitch, target_pitch;
  index_t cols, words;   // of a row, and of all rows
  index_t bytes, first;  // of a word; thread block
};

struct Pieces {  // by value: the launch carries it, no table in device memory
  Piece piece[CAPACITY];
};

static_assert(CAPACITY >= 1 && sizeof(Pieces) + sizeof(index_t) <= 4096,
              "every GPU takes 4096 bytes of parameters");

template <typename Word>
__device__ __forceinline__ void copy(const Piece& piece, index_t block) {
  const index_t cols = piece.cols, word = block * SPAN + threadIdx.x;
  Word words[UNROLL];
  RowWalk<THREADS> reading(word, cols), writing = reading;
#pragma unroll
  for (int u = 0; u < UNROLL; ++u, reading.go_on(cols)) {
    if (word + u * THREADS >= piece.words) continue;
    const char* row = piece.source + reading.row * piece.source_pitch;
    words[u] = reinterpret_cast<const Word*>(row)[reading.col];
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u, writing.go_on(cols)) {
    if (word + u * THREADS >= piece.words) continue;
    char* row = piece.target + writing.row * piece.target_pitch;
    reinterpret_cast<Word*>(row)[writing.col] = words[u];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_pieces(index_t count, Pieces pieces) {
  int low = 0, beyond = static_cast<int>(count);  // the last piece that begins no later
  while (beyond - low > 1) {
    const int middle = (low + beyond) / 2;
    (pieces.piece[middle].first <= blockIdx.x ? low : beyond) = middle;
  }
  const Piece& piece = pieces.piece[low];
  const index_t block = blockIdx.x - piece.first;
  switch (piece.bytes) {
    case 16: return copy<uint4>(piece, block);
    case 8: return copy<unsigned long long>(piece, block);
    case 4: return copy<unsigned int>(piece, block);
    case 2: return copy<unsigned short>(piece, block);
    default: return copy<unsigned char>(piece, block);
  }
}
