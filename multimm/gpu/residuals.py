"""Elements that packed parts do not carry, added to a product of packed operands.

With A = A' + R and B = B' + S, where A' and B' are what the parts carry, the product of the parts
lacks R B + A' S. R and S have few elements, and those of each are gathered into a small dense
matrix, so that their sums have one order.
"""

from __future__ import annotations

from typing import Any

from multimm.gpu import launch
from multimm.gpu.packed import PackedBlock, Residuals

Array = Any


def add_residuals(d: Array, a: PackedBlock, b: PackedBlock, *, alpha: float) -> None:
    """D += alpha * (R @ B + A' @ S), for the residuals R of A and S of B.

    Parameters
    ----------
    d : cupy.ndarray of float32, shape (m, n)
        Written to, on the current stream.
    a, b : PackedBlock
        Of tiles. Most have no residuals: then nothing is launched.
    alpha : float
    """
    if a.residuals is not None:
        _add_rows(d, a.residuals, b, alpha, rests=True)
    if b.residuals is not None:
        _add_rows(d.T, b.residuals, a, alpha, rests=False)


def _add_rows(
    d: Array, residuals: Residuals, other: PackedBlock, alpha: float, *, rests: bool
) -> None:
    """Add alpha * r * (column k of the other operand) to row i of D, for each residual (i, k, r).

    Packed operands have their rows along m or n, so B's columns of k lie along n.
    """
    import cupy

    rows, row_of = cupy.unique(residuals.rows, return_inverse=True)
    ks, k_of = cupy.unique(residuals.ks, return_inverse=True)
    small = cupy.zeros((rows.size, ks.size), cupy.float32)
    small[row_of, k_of] = residuals.values
    found = other.columns(ks, residuals=rests)
    # Not CuPy's addition, which flushes subnormals.
    d[rows] = launch.gemm(small, found, alpha=alpha, beta=1.0, c=d[rows], trans_b=True)
