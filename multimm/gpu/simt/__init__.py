"""Products on the FP32 units: sgemm_ffma, and the kernels for thin operands."""
