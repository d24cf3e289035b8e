"""Products of arrays whose axes have names: xarray's DataArrays."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from multimm.contractions.functions import einsum
from multimm.contractions.subscripts import written
from multimm.errors import OptionError, ShapeError
from multimm.gpu.kernel_selection import Precision


def both_labelled(a: Any, b: Any) -> bool:
    """Whether both are DataArrays, told without importing xarray."""
    kind = getattr(sys.modules.get("xarray"), "DataArray", None)
    return kind is not None and isinstance(a, kind) and isinstance(b, kind)


def matmul(a: Any, b: Any, *, dtype: Any, precision: Precision, others: bool) -> Any:
    """The sum of products over the dimensions that both have: ``a @ b`` of xarray.

    Parameters
    ----------
    a, b : xarray.DataArray
    dtype : dtype or None
        As for `einsum`.
    precision : str
    others : bool
        Options of `multimm.matmul` are given that say how matrices are cut.
    """
    import xarray as xr

    dims = [tuple(map(str, x.dims)) for x in (a, b)]
    shared = [dim for dim in a.dims if dim in b.dims]
    if not shared:
        raise ShapeError(
            f"matmul of DataArrays with dimensions {dims[0]} and {dims[1]}: it sums over those "
            "that both have; rename one, or multiply them with *"
        )
    if others:
        raise OptionError(
            "matmul of DataArrays takes dtype= and precision= alone: blocks, k-tiles and chunks "
            "are those of matrices; pass the arrays in them, x.data, or rechunk the result"
        )
    out = [dim for x in (a, b) for dim in x.dims if dim not in shared]
    # Names may be any objects: numbers stand for them.
    names = {dim: f"d{n}" for n, dim in enumerate(dict.fromkeys((*a.dims, *b.dims)))}
    labels = [tuple(names[dim] for dim in own) for own in (a.dims, b.dims, out)]
    exact = xr.get_options()["arithmetic_join"] == "exact"  # type: ignore[no-untyped-call]
    return xr.apply_ufunc(
        partial(einsum, written(labels[:2], labels[2]), dtype=dtype, precision=precision),
        a,
        b,
        input_core_dims=[a.dims, b.dims],
        output_core_dims=[out],
        join="exact" if exact else "inner",
        dask="allowed",
    )
