// Which thread of a block loads which elements of a k tile, and owns which elements of D.
//
// Every function is one expression of non-negative ints on one line: tests/test_tiles.py reads
// them from this file and enumerates them, so keep them so. Worked numbers are for the
// configuration "large": 128x128 tile, 8x8 values per thread, 256 threads.
//
//          BLOCK_N                    one warp                     one thread
//      +----+----+             +---+---+- - -+---+          owns THREAD_M x THREAD_N values
// B  M | w0 | w1 |   LANES_M=4 |l0 |l1 |     |l7 |          of D in registers, as strips of
// L    +----+----+             +---+---+- - -+---+          STRIP=4 neighbours that lie
// O    | w2 | w3 |             |l8 |   |     |l15|          STRIDE_M rows (STRIDE_N columns)
// C    +----+----+             +- -+- -+- - -+- -+          apart: a strip is one 16-byte
// K    | .. | .. |               LANES_N=8                  shared read, and the strips of
//      +----+----+                                          neighbouring lanes touch.
#pragma once

constexpr int THREADS = BLOCK_M / THREAD_M * (BLOCK_N / THREAD_N);  // 16 * 16 = 256
constexpr int STRIP = 4;                                            // floats in 16 bytes
constexpr int LANES_M = 4;
constexpr int LANES_N = 8;
constexpr int WARPS_N = BLOCK_N / THREAD_N / LANES_N;  // 128 / 8 / 8 = 2
constexpr int STRIDE_M = BLOCK_M / THREAD_M * STRIP;   // 16 * 4 = 64
constexpr int STRIDE_N = BLOCK_N / THREAD_N * STRIP;   // 16 * 4 = 64
constexpr int K_RUN = 8;                               // floats in a 32-byte sector

// Position in the tile of the first strip of a thread, and of its i-th row and j-th column.
__device__ constexpr int strip_row(int thread) { return (thread / 32 / WARPS_N * LANES_M + thread % 32 / LANES_N) * STRIP; }
__device__ constexpr int strip_col(int thread) { return (thread / 32 % WARPS_N * LANES_N + thread % 32 % LANES_N) * STRIP; }
__device__ constexpr int owned_row(int thread, int i) { return strip_row(thread) + i / STRIP * STRIDE_M + i % STRIP; }
__device__ constexpr int owned_col(int thread, int j) { return strip_col(thread) + j / STRIP * STRIDE_N + j % STRIP; }

// An operand's k tile is BLOCK_K long in k and `span` wide in x, its rows (A) or columns (B).
// Memory runs along k: a warp reads 4 runs of K_RUN floats, that is 4 whole sectors. The runs of
// one x are read one after the other by the same lanes, and the second finds its line in L1.
__device__ constexpr int along_k_x(int thread, int load, int span) { return thread / K_RUN + load / (BLOCK_K / K_RUN) * (THREADS / K_RUN); }
__device__ constexpr int along_k_k(int thread, int load, int span) { return thread % K_RUN + load % (BLOCK_K / K_RUN) * K_RUN; }
// Memory runs along x: a warp reads 32 neighbouring floats.
__device__ constexpr int along_x_x(int thread, int load, int span) { return thread % span; }
__device__ constexpr int along_x_k(int thread, int load, int span) { return thread / span + load * (THREADS / span); }

// Words from one k to the next in shared memory. The 4 extra words move a k by 4 banks: 8 k and
// 4 x written by a warp that reads along k fall into 8 * 4 different banks. Rows stay 16-byte
// aligned, for the strips are read 16 bytes at a time.
__device__ constexpr int pitch(int span) { return span + 4; }
