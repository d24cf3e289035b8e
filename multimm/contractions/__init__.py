"""Sums of products over any axes: einsum, tensordot and their like, as block products."""
