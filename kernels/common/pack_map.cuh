// Which thread of split_pack.cu reads, exchanges and writes which elements of a 64 x 64 tile.
//
// Every function below is one expression of non-negative ints on one line: tests/test_pack.py reads
// them from this file and enumerates them, so keep them so.
#pragma once

constexpr int TILE = 64;
constexpr int TILE_ELEMENTS = TILE * TILE;
constexpr int PIECE = 4;                  // lines, and elements of each, that a thread reads
constexpr int PIECES = TILE / PIECE;      // 16 threads side by side read a line of the tile
constexpr int THREADS = PIECES * PIECES;  // 256
constexpr int VECTOR = 8;                 // FP16 numbers in 16 bytes
constexpr int VECTORS = TILE / VECTOR;    // 8 threads write a row of the tile
constexpr int ROWS_AT_ONCE = THREADS / VECTORS;
constexpr int WRITTEN = TILE_ELEMENTS / THREADS;  // elements of a tile that a thread writes: 16

// The line in memory that is a thread's i-th, and the place in it of its e-th element: 4 neighbours
// where lines begin at multiples of 16 bytes, else as 16 threads read 16 neighbours together.
__device__ constexpr int line_of_thread(int thread, int i) { return thread / PIECES * PIECE + i; }
__device__ constexpr int place_in_line(int wide, int thread, int e) { return thread % PIECES * (1 + wide * (PIECE - 1)) + e * (PIECES - wide * (PIECES - 1)); }

// Where the four-th 4 neighbours along k of a row lie in shared memory, counted in 16 bytes: in a
// row of their own; or, where 16 bytes of memory are 4 rows, among those that one thread has
// copied: it turns 4 x 4 elements where they lie. Whichever way 8 neighbouring threads copy or
// read, one of two that follow one another, they meet 8 different groups of 4 banks.
__device__ constexpr int shared_place(int row, int four) { return row * 16 + (four ^ (four >> 3) ^ (row & 7)); }
__device__ constexpr int turned_place(int row, int four) { return (four * 4 + row % 4) * 16 + ((row / 4) ^ (four / 2)); }

// Where the vector-th 8 numbers of a row lie in a packed tile, counted in numbers.
__device__ constexpr int swizzled(int row, int vector) { return row * TILE + (vector ^ (row & 7)) * VECTOR; }
