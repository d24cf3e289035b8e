"""Work maps: which worker computes which block of C, and what it needs for that."""
