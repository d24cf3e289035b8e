"""`verify` of NumPy blocks on GPU workers: they are looked at on the GPUs.

The GPU here is a stand-in, whose arrays are NumPy's by another name.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import counting_client
from distributed import wait
from small import integers
from stand_in import GPUArray

import multimm
from multimm.checks import operands, tasks
from multimm.cluster.describe import describe
from multimm.gpu.transfer import pinned_copy as link
from multimm.graph.tasks import host_offload
from multimm.planning.spec import H200


class Strict(GPUArray):
    """Like a CuPy array: computes with its own kind and scalars alone, and makes its own kind."""

    __module__ = "cupy"

    def __array_ufunc__(self, ufunc, method, *given, **options):
        return there(getattr(ufunc, method)(*map(of_numpy, given), **options))

    def __array_function__(self, func, types, given, options):
        if func is np.asarray:  # `like` this one
            return there(np.array(given[0]))
        return there(func(*map(of_numpy, given), **{k: of_numpy(v) for k, v in options.items()}))


def there(x):
    return np.asarray(x).view(Strict) if isinstance(x, np.ndarray | np.generic) else x


def of_numpy(x):
    """Of a `Strict` array, or several, what NumPy computes with."""
    if isinstance(x, list | tuple):
        return type(x)(map(of_numpy, x))
    if isinstance(x, np.ndarray):
        assert type(x) is Strict, "host memory and a GPU's in one operation"
        return x.view(np.ndarray)
    return x


client = counting_client(2)


@pytest.fixture
def gone_up(monkeypatch):
    """GPU workers; the blocks that were brought to their GPUs."""
    found, back = [], []

    def all_to_device(blocks):
        assert all(type(block) is np.ndarray for block in blocks)
        found.extend(blocks)
        return list(map(there, blocks))

    def to_host(block):
        assert type(block) is Strict, "computed in host memory"
        back.append(block)
        return block.view(np.ndarray)

    def described(client):
        spec = describe(client)
        return spec and replace(spec, devices=(H200,) * spec.workers)

    monkeypatch.setattr(operands, "describe", described)
    monkeypatch.setattr(host_offload, "_device", lambda: 0)
    for stream in ("own_stream", "computing"):
        monkeypatch.setattr(host_offload, stream, lambda device: nullcontext())
    monkeypatch.setattr(link, "all_to_device", all_to_device)
    monkeypatch.setattr(link, "to_host", to_host)
    yield found
    assert bool(found) == bool(back)


def made(dtype="float32"):
    x, y = integers((60, 40), 1).astype(dtype), integers((40, 50), 2).astype(dtype)
    return (*(da.from_array(z, chunks=20) for z in (x, y, x @ y)), x @ y)


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64", "int32"])
def test_blocks_are_looked_at_on_the_gpus(client, gone_up, dtype):
    a, b, c, _ = made(dtype)
    assert multimm.verify(a, b, c)
    blocks = [block for block in gone_up if block.shape[-1] in (10, 20) and block.dtype == a.dtype]
    assert len(blocks) == a.npartitions + b.npartitions + c.npartitions


@pytest.mark.parametrize("at", [(0, 0), (59, 49), (33, 7)])
def test_one_wrong_element_is_found_and_named(client, gone_up, at):
    a, b, _, exact = made()
    exact[at] += 1
    found = multimm.verify(a, b, da.from_array(exact, chunks=(30, 25)))
    assert not found
    assert f"c[{at[0]}, {at[1]}] is wrong: off by 1" in str(found)


def test_large_blocks_go_up_strip_by_strip(client, gone_up, monkeypatch):
    monkeypatch.setattr(tasks, "STRIP", 100)
    a, b, c, exact = made()
    assert multimm.verify(a.rechunk(-1), b, c)
    assert max(block.size for block in gone_up if block.dtype == a.dtype) <= 100
    exact[3, 4] += 1
    assert not multimm.verify(a, b, da.from_array(exact, chunks=-1))


def test_the_other_operands_of_a_check(client, gone_up):
    a, b, c, exact = made()
    found = multimm.verify(a.T, b.T, 2 * c + c, trans_a=True, trans_b=True, alpha=2, beta=1, c0=c)
    assert found
    # A NaN hides its row and column; one more pass goes over the rest.
    x, y, expected = a.compute(), b.compute(), exact.copy()
    x[3, 4] = y[5, 6] = expected[3] = expected[:, 6] = np.nan
    given = (da.from_array(z, chunks=20) for z in (x, y, expected))
    assert multimm.verify(*given)
    nothing = da.zeros((0, 5), chunks=2, dtype="float32")
    assert multimm.verify(nothing.T, da.zeros((0, 4), chunks=2, dtype="float32"), da.zeros((5, 4)))


def test_what_stays_in_host_memory(client, gone_up):
    a, b, c, _ = made("longdouble")  # no GPU has them
    assert multimm.verify(a, b, c)
    # And what this process holds, or computes itself.
    x, y = np.asarray(a, "float32"), np.asarray(b, "float32")
    assert multimm.verify(x, y, x @ y)
    with dask.config.set(scheduler="synchronous"):
        assert multimm.verify(*made()[:3])
    assert gone_up == []


def test_workers_without_gpus_and_without_any(client, gone_up, monkeypatch):
    monkeypatch.setattr(operands, "describe", describe)
    given = made()[:3]
    assert multimm.verify(*given)
    assert gone_up == []
    # What was there when the check was made may have lost its GPU since.
    monkeypatch.setattr(operands, "_hosted", lambda *given: True)
    monkeypatch.setattr(host_offload, "_device", lambda: None)
    assert multimm.verify(*given)
    assert gone_up == []


def test_blocks_that_map_a_file(client, gone_up, tmp_path):
    """They are NumPy's, too, of a type of their own."""
    x = integers((30, 30), 5).astype("float32")
    np.save(tmp_path / "x.npy", x)

    def mapped(block):
        return np.load(tmp_path / "x.npy", mmap_mode="r")

    a = da.from_array(x, chunks=-1).map_blocks(mapped, dtype="float32", meta=x[:0])
    wait(a := a.persist())
    assert type(mapped(None)) is np.memmap
    assert host_offload.on_device(lambda block: block + block, mapped(None))[0, 0] == 2 * x[0, 0]
    assert multimm.verify(a, a, da.from_array(x @ x, chunks=10))


def test_few_operations_on_a_gpu(client, gone_up, monkeypatch):
    """CuPy compiles a kernel for each on the first day of a machine: a fifth of a second."""
    seen = set()
    compute = Strict.__array_ufunc__

    def seeing(self, ufunc, method, *given, **options):
        seen.add((ufunc.__name__, method, *(str(x.dtype) for x in given if type(x) is Strict)))
        return compute(self, ufunc, method, *given, **options)

    monkeypatch.setattr(Strict, "__array_ufunc__", seeing)
    a, b, c, exact = made()
    assert multimm.verify(a, b, c)
    usual = {
        ("absolute", "__call__", "float64"),
        ("add", "reduce", "float64"),
        ("maximum", "reduce", "float64"),
        ("matmul", "__call__", "float64", "float64"),
    }
    assert seen == usual
    exact[1, 2] = np.nan
    assert not multimm.verify(a, b, da.from_array(exact, chunks=20))
    assert seen > usual
