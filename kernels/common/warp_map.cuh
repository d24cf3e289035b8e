// Which thread of a block copies which elements of a k tile, and owns which elements of D.
//
// Every function is one expression of non-negative ints on one line: tests/test_tiles.py reads
// them from this file and enumerates them, so keep them so. Worked numbers are for the
// configuration "large": 128x256 tile, 16x8 values per thread, 256 threads, 4 x 8 lanes.
//
//          BLOCK_N                  one warp: WARP_M x WARP_N          one thread
//      +----+----+----+----+        +--+--+--+--+- -+--+--+   owns THREAD_M x THREAD_N values of
// B  M | w0 | w1 | w2 | w3 |        |l0|l1|l8|l9|   |24|25|   D in registers, as strips of
// L    +----+----+----+----+        +--+--+--+--+- -+--+--+   STRIP=4 neighbours: a strip is one
// O    | w4 | w5 | w6 | w7 |        |l2|l3|10|11|   |26|27|   16-byte shared read. Strips of
// C    |    |    |    |    |        +--+--+--+--+- -+--+--+   neighbouring lanes touch, strips of
// K    +----+----+----+----+        |l4|l5| ..              one thread lie LANES strips apart.
//
// Lanes are numbered in pairs: within 8 lanes there are 4 places along one side and 2 along the
// other, and lanes 2i and 2i+1, or i and i+2, read the same 16 bytes. A request for 16 bytes per
// lane is then served for 16 lanes at a time instead of 8.
#pragma once

constexpr int STRIP = 4;                                            // floats in 16 bytes
constexpr int LANES_N = 32 / LANES_M;                               // 32 / 4 = 8
constexpr int WARP_M = LANES_M * THREAD_M;                          // 4 * 16 = 64
constexpr int WARP_N = LANES_N * THREAD_N;                          // 8 * 8 = 64
constexpr int WARPS_N = BLOCK_N / WARP_N;                           // 256 / 64 = 4
constexpr int THREADS = BLOCK_M / WARP_M * WARPS_N * 32;            // 2 * 4 * 32 = 256
constexpr int STRIDE_M = LANES_M * STRIP;                           // 4 * 4 = 16
constexpr int STRIDE_N = LANES_N * STRIP;                           // 8 * 4 = 32
constexpr int PAIRED_M = LANES_M / 4;                               // 4 lanes: 1, 8 lanes: 2
constexpr int K_RUN = 8;                                            // floats in a 32-byte sector

// A warp's first row and column; a lane's place in it; a thread's first strip; what it owns.
__device__ constexpr int warp_row(int thread) { return thread / 32 / WARPS_N * WARP_M; }
__device__ constexpr int warp_col(int thread) { return thread / 32 % WARPS_N * WARP_N; }
__device__ constexpr int lane_wide(int lane) { return lane / 8 * 2 + lane % 2; }
__device__ constexpr int lane_narrow(int lane) { return lane / 2 % 4; }
__device__ constexpr int lane_m(int lane) { return (PAIRED_M - 1) * lane_wide(lane) + (2 - PAIRED_M) * lane_narrow(lane); }
__device__ constexpr int lane_n(int lane) { return (PAIRED_M - 1) * lane_narrow(lane) + (2 - PAIRED_M) * lane_wide(lane); }
__device__ constexpr int strip_row(int thread) { return warp_row(thread) + lane_m(thread % 32) * STRIP; }
__device__ constexpr int strip_col(int thread) { return warp_col(thread) + lane_n(thread % 32) * STRIP; }
__device__ constexpr int owned_row(int thread, int i) { return strip_row(thread) + i / STRIP * STRIDE_M + i % STRIP; }
__device__ constexpr int owned_col(int thread, int j) { return strip_col(thread) + j / STRIP * STRIDE_N + j % STRIP; }

// An operand's k tile is BLOCK_K long in k and `span` wide in x, its rows (A) or columns (B).
// Memory runs along k: a warp copies 4 runs of K_RUN floats, that is 4 whole sectors; the copies
// of one x follow one another, and the second finds its line in L1.
__device__ constexpr int along_k_x(int thread, int copy) { return thread / K_RUN + copy / (BLOCK_K / K_RUN) * (THREADS / K_RUN); }
__device__ constexpr int along_k_k(int thread, int copy) { return thread % K_RUN + copy % (BLOCK_K / K_RUN) * K_RUN; }
// Memory runs along x: neighbouring threads copy neighbouring words of `floats` floats.
__device__ constexpr int along_x_x(int thread, int span, int floats) { return thread % (span / floats) * floats; }
__device__ constexpr int along_x_k(int thread, int copy, int span, int floats) { return thread / (span / floats) + copy * (THREADS * floats / span); }

// Words from one k to the next in shared memory. Copied along k, the 4 extra words move a k by 4
// banks: 8 k and 4 x then fall into 8 * 4 different banks. Rows stay 16-byte aligned.
__device__ constexpr int pitch(int span, int along_k) { return span + 4 * along_k; }
