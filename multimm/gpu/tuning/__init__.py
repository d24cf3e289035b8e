"""The fastest configuration on this GPU, measured; kernels compiled before they are needed."""
