"""Products of float64 matrices as products of small integers, on the INT8 tensor cores."""
