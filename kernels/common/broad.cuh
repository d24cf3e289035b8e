// Numbers of a wide range on the tensor cores: bfloat16 and TF32 have the exponents of float32.
//
//   y = x / 2^(e - 33)        e as in common/split.cuh, so that 2^47 <= max |y| < 2^48 in each row
//
//   PARTS 3    high = bfloat16(y), middle = bfloat16(y - high), low = y - high - middle
//              8 bits each: all 24 of a float32, nothing is lost
//   PARTS 1    TF32(y), 11 bits
//
// All are rounded to nearest. An element is carried from 2^-62 on, 2^109 times below the largest of
// its row: then no product of two is below 2^-124, where a sum in float32 would lose bits. And sums
// stay below 2^127 for every k up to 2^31.
#pragma once

constexpr int BROAD_SHIFT = 33;
constexpr float LEAST_BROAD = 1.0f / (1ull << 62);
