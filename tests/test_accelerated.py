"""Dask's own algorithms, and those of others, around products inside `accelerate()`."""

from __future__ import annotations

import warnings
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from clusters import in_threads
from commands import python
from distributed import Client
from repeated import here_and_on_workers

import multimm

TESTS_OF_DASK = Path(da.__file__).parent / "tests"
TESTS_OF_XARRAY = Path(xr.__file__).parent / "tests"
#: What enters `accelerate()` around each of them.
PLUGIN = """
import multimm, pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    with multimm.accelerate():
        yield
"""

pytestmark = pytest.mark.filterwarnings("ignore::dask.array.PerformanceWarning")


@pytest.fixture(scope="module")
def workers(request):
    """With and without a cluster."""
    if not request.param:
        with dask.config.set(scheduler="sync"):
            yield
        return
    with in_threads(request.param, memory_limit=0) as cluster, Client(cluster):
        yield


def data():
    rng = np.random.default_rng(0)
    return {
        "tall": da.from_array(rng.random((400, 30)), chunks=(40, 30)),
        "w": da.from_array(rng.random((30, 12)), chunks=(30, 12)),
        "squares": da.from_array(rng.random((40, 40)) + 40 * np.eye(40), chunks=10),
        "wide": da.from_array(rng.random((30, 400)), chunks=(10, 400)),
        "across": da.from_array(rng.random((400, 30)), chunks=(400, 10)),
        "dosage": da.from_array(rng.integers(0, 3, (300, 24)).astype(float), chunks=(70, 7)),
    }


def centred(block):
    return block - block.mean(axis=0)


def genomic_relationship(dosage):
    """How alike individuals are: VanRaden, "Efficient methods to compute genomic predictions",
    Journal of Dairy Science 91 (2008), its first method. Rows are variants.
    """
    frequency = da.nanmean(dosage, axis=1, keepdims=True) / 2
    deviation = da.where(da.isnan(dosage), 0.0, dosage - 2 * frequency)
    return deviation.T @ deviation / (2 * (frequency * (1 - frequency)).sum())


def fitted(x):
    from dask_ml.decomposition import PCA

    pca = PCA(n_components=3, svd_solver="randomized", random_state=0, iterated_power=2)
    return pca.fit(x).singular_values_


def variances(x):
    """Of the empirical orthogonal functions that xeofs finds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what xeofs uses of xarray is deprecated
        import xeofs

        coords = {"time": np.arange(len(x)), "place": np.arange(x.shape[1])}
        field = xr.DataArray(x, dims=("time", "place"), coords=coords)
        model = xeofs.single.EOF(n_modes=3, random_state=0)
        return model.fit(field, dim="time").explained_variance().values


ALGORITHMS = {
    "inv": lambda d: da.linalg.inv(d["squares"] @ d["squares"]),
    "inv with products": lambda d: da.linalg.inv(d["squares"]),
    "solve": lambda d: da.linalg.solve(d["squares"] @ d["squares"], d["squares"][:, :10]),
    "solve for a vector": lambda d: da.linalg.solve(d["squares"], d["squares"] @ d["squares"][0]),
    "cholesky": lambda d: da.linalg.cholesky(d["squares"] @ d["squares"].T),
    "lu": lambda d: da.linalg.lu(d["squares"] @ d["squares"])[2],
    "qr": lambda d: abs(da.linalg.qr(d["tall"] @ d["w"])[1]),
    "tsqr": lambda d: abs(da.linalg.tsqr(d["tall"] @ d["w"])[1]),
    "sfqr": lambda d: abs(da.linalg.sfqr(d["w"].T @ d["wide"])[1]),
    "svd": lambda d: da.linalg.svd(d["tall"] @ d["w"])[1],
    "svd_compressed": lambda d: da.linalg.svd_compressed(d["tall"], 3, n_power_iter=2, seed=0)[1],
    "svd_compressed of wide": lambda d: da.linalg.svd_compressed(d["wide"], 3, seed=0)[1],
    "svd_compressed across": lambda d: da.linalg.svd_compressed(d["across"], 3, seed=0)[1],
    "lstsq": lambda d: da.linalg.lstsq(d["tall"], d["tall"] @ d["w"][:, 0])[0],
    "shares of rows": lambda d: (d["tall"] @ d["w"]).map_blocks(
        lambda block: block / block.sum(axis=1, keepdims=True)
    ),
    "what a block is centred by": lambda d: (d["tall"] @ d["w"]).map_blocks(centred),
    "map_blocks of two": lambda d: da.map_blocks(
        lambda x, y: x * y.sum(), d["squares"] @ d["squares"], d["squares"], dtype=float
    ),
    "a block": lambda d: (d["tall"] @ d["w"]).blocks[3],
    "partitions": lambda d: (d["squares"] @ d["squares"]).partitions[1, 2],
    "apply_gufunc": lambda d: da.apply_gufunc(
        lambda x: x.max(axis=-1), "(i)->()", d["tall"] @ d["w"], output_dtypes=float
    ),
    "argtopk": lambda d: da.argtopk(d["tall"] @ d["w"], 2, axis=1),
    "map_overlap": lambda d: (d["tall"] @ d["w"]).map_overlap(lambda x: x, depth=1, boundary=0),
    "genomic relationship": lambda d: genomic_relationship(d["dosage"]),
    "dask-ml's randomized PCA": lambda d: fitted(d["tall"]),
    "xeofs's EOF": lambda d: variances(d["tall"]),
}


#: Of these, on workers, `make test` runs others that are like them.
LONG_ON_WORKERS = ("inv", "solve", "lu", "svd", "dask-ml's randomized PCA", "xeofs's EOF")


@pytest.mark.usefixtures("workers")
@here_and_on_workers("workers", ALGORITHMS, LONG_ON_WORKERS)
def test_what_is_built_on_products_gives_what_it_gives_without(name):
    made = ALGORITHMS[name]
    right = made(data())
    with multimm.accelerate():
        found = made(data())
    assert getattr(found, "chunks", None) == getattr(right, "chunks", None)
    right, found = dask.compute(right, found)
    np.testing.assert_allclose(found, right, rtol=1e-8, atol=1e-10)


def failing(folder, tests, *more):
    """Which of some tests fail, and all that was said of them."""
    command = ["-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *more]
    path = f"{Path(multimm.__file__).parents[1]}:{folder}"
    done = python(*command, *tests, cwd=folder, env={"PYTHONPATH": path})
    lines = [line.split() for line in done.stdout.splitlines()]
    failed = sorted(x[1].split("/")[-1] for x in lines if x and x[0] in ("FAILED", "ERROR"))
    return failed, done.stdout


#: Tests of others: folder, files, and words in the names of those that multiply.
TESTS_OF_OTHERS = {
    "Dask's": (
        TESTS_OF_DASK, [f"test_{name}.py" for name in (
            "routines", "linalg", "masked", "array_core", "array_function"
        )],
        "matmul or dot or einsum or outer or cov or corrcoef or compressed or lstsq"
        " or function_dask",
    ),
    "xarray's dot": (
        TESTS_OF_XARRAY, ["test_computation.py", "test_dataarray.py"],
        "dot or matmul",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTS_OF_OTHERS)
def test_others_own_tests_of_products_give_what_they_give_without(tmp_path, name):
    (tmp_path / "around.py").write_text(PLUGIN)
    folder, files, words = TESTS_OF_OTHERS[name]
    paths = [str(folder / file) for file in files]
    failed, said = failing(tmp_path, paths, "-k", words, "-p", "around")
    assert " passed" in said, said
    again = [str(folder / test) for test in failed]
    assert not failed or failing(tmp_path, again)[0] == failed, said
