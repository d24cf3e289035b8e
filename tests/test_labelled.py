"""Products of xarray's DataArrays."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import multimm
from multimm.errors import DTypeError, OptionError, ShapeError


def field(shape, dims, seed, lazy=True, **coords):
    x = np.random.default_rng(seed).integers(-4, 5, shape).astype(float)
    return xr.DataArray(da.from_array(x, chunks=2) if lazy else x, dims=dims, coords=coords)


CASES = {
    "matrices": (((5, 4), ("i", "k")), ((4, 3), ("k", "j"))),
    "in another order": (((4, 5), ("k", "i")), ((3, 4), ("j", "k"))),
    "two dimensions": (((5, 4, 3), ("t", "x", "y")), ((3, 2, 4), ("y", "m", "x"))),
    "all dimensions": (((5, 4), ("t", "x")), ((4, 5), ("x", "t"))),
    "a vector": (((5, 4), ("t", "x")), ((4,), ("x",))),
    "names of any kind": (((5, 4), (0, "a b")), ((4, 3), ("a b", ("t", 1)))),
}


@pytest.mark.parametrize("lazy", [True, False], ids=["dask", "numpy"])
@pytest.mark.parametrize("name", CASES)
def test_matmul_of_dataarrays_is_xarrays(name, lazy):
    (shape_a, dims_a), (shape_b, dims_b) = CASES[name]
    a, b = field(shape_a, dims_a, 0, lazy), field(shape_b, dims_b, 1, lazy)
    expected, found = a @ b, multimm.matmul(a, b)
    assert isinstance(found, xr.DataArray)
    assert isinstance(found.data, da.Array) == lazy
    assert found.chunks == expected.chunks
    xr.testing.assert_identical(found.compute(), expected.compute())
    if lazy:
        assert any(layer.startswith("multimm") for layer in found.data.dask.layers)


@pytest.mark.parametrize("join", ["inner", "outer", "exact"])
def test_coordinates_are_joined_as_xarray_joins_them(join):
    a = field((5, 4), ("i", "k"), 0, i=[*"abcde"], k=[0, 1, 2, 3])
    b = field((4, 3), ("k", "j"), 1, k=[1, 2, 3, 4], j=[7, 8, 9])
    with xr.set_options(arithmetic_join=join):
        if join == "exact":
            with pytest.raises(ValueError, match="align"):
                multimm.matmul(a, b)
        else:
            xr.testing.assert_identical(multimm.matmul(a, b).compute(), (a @ b).compute())


@pytest.mark.parametrize("lazy", [True, False], ids=["dask", "numpy"])
def test_integers_are_summed_in_the_dtype_asked_for(lazy):
    x = xr.DataArray(np.full((3, 500), 127, "int8"), dims=("i", "k"), name="genotypes")
    x = x.chunk(k=100) if lazy else x
    found = multimm.matmul(x, x.rename(i="j"), dtype="int32")
    assert found.dtype == found.compute().dtype == np.int32
    assert found.dims == ("i", "j")
    assert (found == 500 * 127**2).all()
    with pytest.raises(DTypeError, match="hold"):
        multimm.matmul(x, x.rename(i="j"), dtype="uint8")


def test_what_no_product_of_dataarrays_is_says_so():
    a = field((5, 4), ("i", "k"), 0)
    with pytest.raises(ShapeError, match="both have"):
        multimm.matmul(a, a.rename(i="j", k="l"))
    with pytest.raises(OptionError, match="dtype= and precision= alone"):
        multimm.matmul(a, a, blocks=16)
    with pytest.raises(OptionError, match="fp8"):
        multimm.matmul(a, a, precision="fp8")
    with pytest.raises(TypeError, match=r"x\.data"):
        multimm.matmul(a, np.ones((4, 3)))
