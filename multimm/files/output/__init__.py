"""Writing a matrix: under a temporary name first, and under its own when it is whole."""
