"""Families of layouts beside the search over grids, each in a module."""
