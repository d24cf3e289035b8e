"""How a problem is cut: blocks, k-tiles, grids of workers, and where the cuts lie."""
