"""Blocks between host memory and a GPU."""
