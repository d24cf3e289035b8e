"""Measurements of the kernels, and the records they leave in results/."""
