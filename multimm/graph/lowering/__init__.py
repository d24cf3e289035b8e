"""A plan becomes tasks: loops over its blocks, and what brings operands into those."""
