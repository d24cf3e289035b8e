"""float32 products on the tensor cores: operands split into FP16 parts, multiplied, made good."""
