"""Products of float64 and complex matrices as products of bytes, on the INT8 tensor cores."""
