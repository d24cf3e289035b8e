"""Exact products of integers, by the floating-point units that are fast: see `integers.gemm`."""
