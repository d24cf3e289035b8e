"""A task that fails names its block, its worker and its cause, in one line."""

from __future__ import annotations

import re
import time
import traceback

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import in_threads
from distributed import Client, KilledWorker, Scheduler, get_worker
from repeated import others_slow

import multimm
from multimm.cluster.inspect.cluster_spec import listed
from multimm.errors import ArrayTypeError, FileFormatError, ShapeError
from multimm.failures import told
from multimm.graph.tasks import multiply
from multimm.io import Output, open_array, save_array


@pytest.fixture(scope="module")
def client():
    """Errors of its workers reach the client as bytes, as those of other processes do."""
    with in_threads(2, memory_limit=0, silence_logs=50) as cluster, Client(cluster) as client:
        yield client


class OutOfMemoryError(MemoryError):
    """As CuPy's: what it does not give to its constructor is lost on the way."""

    def __init__(self, size):
        self.size = size
        super().__init__(f"Out of memory allocating {size} bytes")

    def __reduce__(self):
        return type(self), (self.size,)


def masked(block):
    return np.ma.masked_array(block)


def short(block):
    return block[:, :-1]


def low(block):
    return block[:-1]


def spoil(change):
    """Ones in 3 x 3 blocks, of which one is not what the chunks say."""

    def block(x, block_info=None):
        return change(x) if block_info[0]["chunk-location"] == (1, 2) else x

    ones = da.ones((60, 60), chunks=20, dtype="float32")
    return ones.map_blocks(block, name=f"spoilt-{change.__name__}", meta=ones._meta)


def failure(lazy, kind):
    """The one line that the task left of its error."""
    with pytest.raises(kind) as caught:
        lazy.compute()
    error = caught.value
    assert type(error) is kind
    (line,) = error.__notes__
    assert "\n" not in line
    assert line == told(error)
    assert line.endswith(f"{kind.__name__}: {error}")
    assert line in "".join(traceback.format_exception(error))
    return line


def on_a_worker(client, line):
    return any(f" failed on {address}: " in line for address in listed(client))  # asked anew


@pytest.mark.parametrize(
    ("change", "kind", "p_k", "said"),
    [
        (short, ShapeError, 1, " of C, k-tile 2, from ('spoilt-short', 1, 2) and ('other', 2, "),
        (
            masked,
            ArrayTypeError,
            3,
            " of C, k-tile 2, from ('spoilt-masked', 1, 2) and ('other', 2, ",
        ),
        (low, ShapeError, 3, " of C, k-tile 2, from ('spoilt-low', 1, 2) and ('other', 2, "),
    ],
)
def test_a_block_that_is_not_what_its_chunks_say(client, change, kind, p_k, said):
    b = da.ones((60, 80), chunks=20, dtype="float32").map_blocks(np.copy, name="other")
    c = multimm.matmul(spoil(change), b, blocks=20, slabs=20, p_k=p_k)
    line = failure(c, kind)
    assert line.startswith("block (1, ")
    assert said in line
    assert on_a_worker(client, line)


def test_a_block_that_would_make_one_of_c_too_small(client):
    """No kernel can know: nothing is added to it."""

    def block(x, block_info=None):
        return x[:1] if block_info[0]["chunk-location"] == (1, 0) else x

    a, b = (da.ones(shape, chunks=20, dtype="float32") for shape in ((60, 20), (20, 40)))
    low = a.map_blocks(block, name="low", meta=a._meta)
    line = failure(multimm.matmul(low, b, blocks=20), ShapeError)
    assert ") of C, from ('low', 1, 0) and (" in line
    assert "a block of an operand has shape (1, 20), its array's chunks say (20, 20)" in line
    assert "make the array with chunks= as its function returns them" in line
    stack = da.stack([a, low])
    line = failure(multimm.matmul(stack, b, blocks=20), ShapeError)
    assert line.startswith("block (1, 1, ")
    line = failure(multimm.gemm(1, a, b, 1, da.hstack([low, low]), blocks=20), ShapeError)
    assert line.startswith("block (1, ")


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "change", "b_too"),
    [
        ((40, 20), (20, 40), lambda x: x[..., :1], True),  # k on both sides, of x @ x.T
        ((40, 40), (40, 40), lambda x: x[..., :1], True),  # in k-tiles
        ((2, 40, 20), (2, 20, 40), lambda x: x[:1], False),  # one matrix for all of a stack
        ((2, 40, 20), (20, 40), lambda x: x[:1], False),
    ],
)
def test_blocks_that_are_wrong_alike_are_found(client, a_shape, b_shape, change, b_too):
    """The result has the right shape: who forgot chunks= in map_blocks would not notice."""
    a = da.ones(a_shape, chunks=(2, 20, 20)[-len(a_shape) :], dtype="float32")
    wrong = a.map_blocks(change, name=f"wrong-{a_shape}", meta=a._meta)
    b = da.ones(b_shape, chunks=(2, 20, 20)[-len(b_shape) :], dtype="float32")
    b = wrong.swapaxes(-1, -2) if b_too else b
    c = multimm.matmul(wrong, b, blocks=20, slabs=20)
    line = failure(c, ShapeError)
    assert "a block of an operand has shape (" in line
    assert "its array's chunks say (" in line


def test_symmetric_products_and_c_name_their_blocks_too(client):
    ones = da.ones((60, 60), chunks=20, dtype="float32")
    spoilt = spoil(masked)
    symmetric = multimm.matmul(spoilt, spoilt.T, blocks=20, slabs=20)
    assert ", from ('spoilt-masked', 1, 2)" in failure(symmetric, ArrayTypeError)
    line = failure(multimm.gemm(1, ones, ones, 1, spoilt, blocks=20, slabs=60), ArrayTypeError)
    assert line.startswith("block (1, 2) of C, from ('spoilt-masked', 1, 2), failed on ")


def test_a_block_that_cannot_be_read_or_written(client, tmp_path):
    ones = np.ones((40, 40), np.float32)
    path = save_array(ones, tmp_path / "a.npy")
    a = open_array(path, chunks=20)
    c = multimm.matmul(a, da.ones((40, 40), chunks=20, dtype="float32"), blocks=20, slabs=20)
    path.unlink()
    line = failure(c, FileFormatError)
    assert line.startswith("block (")
    assert ") of A failed on" in line
    assert str(path) in line
    assert failure(a, FileFormatError).startswith("task ('read-")
    with Output(tmp_path / "b.npy") as output:
        line = failure(output.store(spoil(low)), ShapeError)
        assert line.startswith("task ('spoilt-low-write-")  # Dask has made one task of both
        assert ", 1, 2) failed on" in line


def test_transposes_and_checks_name_their_task(client):
    line = failure(multimm.transpose(spoil(masked)), ArrayTypeError)
    assert line.startswith("task ('transpose-")
    assert "', 2, 1) failed on" in line
    assert on_a_worker(client, line)
    ones = da.ones((60, 60), chunks=20, dtype="float32")
    with pytest.raises(ValueError, match=r"has shape \(20, 19\), its array's chunks say") as caught:
        multimm.verify(spoil(short), ones, ones)
    assert ", 1, 2, 0) failed on" in told(caught.value)


@pytest.mark.parametrize(("verb", "p_k"), [("gemm", 1), ("summed", 2)])
def test_memory_errors_keep_type_and_text(client, monkeypatch, verb, p_k):
    def fails(*args, **options):
        raise OutOfMemoryError(2**40)

    monkeypatch.setattr(multiply, verb, fails)
    ones = da.ones((40, 40), chunks=20, dtype="float32")
    line = failure(multimm.matmul(ones, ones, blocks=20, slabs=20, p_k=p_k), OutOfMemoryError)
    assert line.startswith("block (")
    assert line.endswith(f": OutOfMemoryError: Out of memory allocating {2**40} bytes")
    assert on_a_worker(client, line)


@pytest.mark.parametrize("batch", [(), (4,)])
def test_a_block_that_is_cut_names_the_block_that_it_is_for(client, batch):
    def block(x, block_info=None):
        return masked(x) if block_info[0]["chunk-location"][-2:] == (1, 1) else x

    ones = da.ones((*batch, 60, 60), chunks=(*(2,) * len(batch), 30, 30), dtype="float32")
    spoilt = ones.map_blocks(block, name=f"to-cut-{len(batch)}", meta=ones._meta)
    line = failure(multimm.matmul(spoilt, ones, blocks=20, slabs=20), ArrayTypeError)
    at = rf"\(({'[01], ' * len(batch)}[12], [12])\) of A"
    assert re.match(rf"(block {at}, joined|part of block {at}), from ", line), line
    assert on_a_worker(client, line)


def end_worker(block, held, late=False):
    """What a nanny does to a worker that holds too much, while a task runs there."""
    worker = get_worker()
    (scheduler,) = (s for s in Scheduler._instances if s.address == worker.scheduler.address)

    async def end():
        told = {"worker": worker.address, "pid": 1, "rss": held}
        if held and not late:
            scheduler.log_event("worker-restart-memory", told)
        await scheduler.remove_worker(worker.address, stimulus_id="ended", close=False)
        if held and late:
            scheduler.log_event("worker-restart-memory", told)

    worker.loop.add_callback(end)
    time.sleep(0.5)
    return block


def given_up(held, way, workers=1, late=False, spoilt=True):
    """The line of a task whose workers were ended, all of them: one that makes an operand block."""
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": workers - 1}),
        in_threads(workers, memory_limit="2GB", silence_logs=50) as cluster,
        Client(cluster),
    ):
        ones = da.ones((4, 4), chunks=4)
        ending = ones.map_blocks(end_worker, held, late, name="ending", meta=ones._meta)
        with pytest.raises(KilledWorker) as caught:
            way(multimm.matmul(ending if spoilt else ones, ones))
    return told(caught.value)


@pytest.mark.parametrize(
    "way", others_slow(["compute", "persist", "save_array", "to_zarr"], "persist", "to_zarr")
)
def test_workers_that_are_ended_for_their_memory_are_named(tmp_path, way):
    ways = {
        "compute": lambda c: c.compute(),
        "persist": lambda c: c.persist().compute(),
        "save_array": lambda c: save_array(c, tmp_path / "c.npy"),
        "to_zarr": lambda c: c.to_zarr(tmp_path / "c.zarr"),
    }
    assert re.fullmatch(
        r".+ was given up, for 1 worker died while running it; Dask ended workers for their "
        r"memory, the last when it held 1\.95 GB of its 2 GB: give each worker more memory, .+",
        given_up(1_950_000_000, ways[way]),
    )


def test_a_nanny_may_say_so_when_the_worker_is_gone():
    line = given_up(1_950_000_000, lambda c: c.compute(), workers=2, late=True)
    assert "for 2 workers died while running it; Dask ended workers for their memory" in line


def test_a_task_of_a_product_that_is_given_up_is_named_by_its_block(monkeypatch):
    monkeypatch.setattr(multiply, "gemm", lambda a, *rest, **options: end_worker(a, 0))
    line = given_up(0, lambda c: c.compute(), spoilt=False)
    assert line.startswith("block (0, 0) of C was given up, for 1 worker died while running it")


def test_workers_that_dask_did_not_end_are_named():
    line = given_up(0, lambda c: c.compute())
    assert (
        "was given up, for 1 worker died while running it; as far as the scheduler was told" in line
    )
