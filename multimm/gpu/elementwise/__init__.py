"""Kernels that move or add elements: sums of partial results, transposes, copies of blocks."""
