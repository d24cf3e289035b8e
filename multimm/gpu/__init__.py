"""The Python side of kernels/: what to launch, with which parameters, on which arrays."""
