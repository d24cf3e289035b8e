"""Files whose storage chunks are decoded as a whole: what plans know of them, and do about it."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import LocalCluster

import multimm
from multimm.errors import FileFormatError, MemoryBudgetError
from multimm.files import graph, locate, storage_chunks
from multimm.files import zarr as zarr_files
from multimm.graph.lowering.operand import storage_of
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import reading
from multimm.planning.matrix import Storage
from multimm.planning.plan import MatmulPlan
from multimm.planning.problem import Problem
from multimm.planning.spec import (
    H200,
    LOCAL_TCP,
    NVLINK,
    ClusterSpec,
    DeviceSpec,
    MatrixSpec,
)

zarr = pytest.importorskip("zarr")
LocalStore = pytest.importorskip("zarr.storage").LocalStore
h5py = pytest.importorskip("h5py")
RNG = np.random.default_rng(0)
X = RNG.integers(-3, 4, (600, 230)).astype("f4")


def cpus(memory: float, workers: int = 1, threads: int = 1) -> ClusterSpec:
    device = DeviceSpec("cpu", "cpu", int(memory), 60.0, 20.0, process_bytes=110_000_000)
    return ClusterSpec.homogeneous(device, workers, LOCAL_TCP, threads)


def inspect(path):
    return zarr_files.inspect(locate(str(path), None))


def tall(shape=(200_000, 1000), chunk=(200_000, 50), codec="") -> MatrixSpec:
    """An operand in tall storage chunks, as it is read."""
    size = chunk[0] * chunk[1] * 4
    return MatrixSpec(shape, storage=Storage(chunk, 4, size * (1 + bool(codec)), size, codec=codec))


def planned(a: MatrixSpec, b: MatrixSpec, cluster: ClusterSpec) -> MatmulPlan:
    return plan_matmul(Problem(a, b, rereadable=(True, True)), cluster)


# ------------------------------------------------------- what files say


@pytest.mark.parametrize(
    ("options", "chunk", "codec"),
    [
        ({"chunks": (100, 50), "compressors": None}, (100, 50), ""),
        ({"chunks": (100, 50)}, (100, 50), "other"),
        ({"chunks": (100, 50), "shards": (200, 100)}, (100, 50), "other"),
        ({"chunks": (100, 50), "compressors": zarr.codecs.GzipCodec()}, (100, 50), "slow"),
        (
            {"chunks": (100, 50), "zarr_format": 2, "compressors": None, "order": "F"},
            (100, 50),
            "",
        ),
    ],
)
def test_a_zarr_store_says_what_is_decoded_as_a_whole(tmp_path, options, chunk, codec):
    zarr.create_array(tmp_path / "x.zarr", data=X, **options)
    stored = storage_of(multimm.io.open_array(tmp_path / "x.zarr"))
    assert (stored.chunk, stored.codec) == (chunk, codec)
    decoded = min(X.nbytes * 1.1, 8e6)  # chunks at the edges are as large as others
    assert stored.decoding <= (4 if options.get("compressors", 1) else 1.1) * decoded
    assert stored.copied <= 1.1 * decoded


@pytest.mark.parametrize(
    ("options", "codec"),
    [
        ({}, None),
        ({"chunks": (100, 50)}, None),
        ({"chunks": (100, 50), "compression": "gzip"}, "slow"),
        ({"chunks": (100, 50), "compression": "lzf", "shuffle": True}, "other"),
        ({"chunks": (100, 50), "fletcher32": True}, "other"),
    ],
)
def test_hdf5_decodes_chunks_behind_filters_alone(tmp_path, options, codec):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=X, **options)
    stored = storage_of(multimm.io.open_array(tmp_path / "x.h5"))
    if codec is None:
        assert stored is None
    else:
        assert (stored.chunk, stored.codec) == ((100, 50), codec)
        assert 100 * 50 * 4 <= stored.decoding <= 3 * 100 * 50 * 4


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
def test_an_npy_file_is_mapped_few_rows_at_a_time(tmp_path, monkeypatch, order, dtype):
    monkeypatch.setattr(storage_chunks, "AT_ONCE", 20_000)
    np.save(tmp_path / "x.npy", np.asarray(X, dtype, order=order))
    mapped, memmap = [], np.memmap

    def counted(file, dtype, mode, offset, shape, order):
        mapped.append(shape)
        return memmap(file, dtype, mode, offset, shape, order)

    monkeypatch.setattr(np, "memmap", counted)
    lazy = multimm.io.open_array(tmp_path / "x.npy", chunks=(333, 77))
    assert storage_of(lazy) is None
    found = lazy.compute(scheduler="sync")
    np.testing.assert_array_equal(found, X)
    assert found.dtype.isnative
    assert max(rows * columns * 4 for rows, columns in mapped) <= 20_000


# ------------------------------------------------------- what plans count


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("blocks", [(70, 64), (200, 100)])
def test_as_many_chunks_are_decoded_as_planned(tmp_path, monkeypatch, trans_a, blocks):
    stored = {"a": X.T if trans_a else X, "b": X.T[:, :120]}
    for name, values in stored.items():
        zarr.create_array(tmp_path / f"{name}.zarr", data=values, chunks=(100, 50))
    a, b = (multimm.io.open_array(tmp_path / f"{name}.zarr") for name in stored)
    lazy, options = (a.T if trans_a else a, b), {"blocks": blocks, "slabs": 90}
    plan = multimm.plan(*lazy, **options)
    read: Counter[str] = Counter()
    get = LocalStore.get

    async def counted(self, key, *more, **options):
        read[self.root.name[0]] += key.startswith("c/")
        return await get(self, key, *more, **options)

    monkeypatch.setattr(LocalStore, "get", counted)
    c = multimm.matmul(*lazy, **options).compute(scheduler="sync")
    np.testing.assert_array_equal(c, X @ X.T[:, :120])
    assert dict(read) == {role: reading.decodes(plan.layout, role) for role in "ab"}


class Meeting:
    """An array whose boxes wait until as many are read at the same time."""

    def __init__(self, array, met):
        self._array, self._met = array, met

    def __getattr__(self, name):
        return getattr(self._array, name)

    def __getitem__(self, where):
        self._met.wait(30)  # raises if fewer come
        return self._array[where]


@pytest.mark.parametrize("together", [1, 2, 4])
def test_gpu_workers_decode_several_chunks_at_a_time(tmp_path, monkeypatch, together):
    zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(100, 50))
    matrix, where = inspect(tmp_path / "x.zarr"), (slice(110, 440), slice(30, 100))  # 4 x 2 chunks
    monkeypatch.setattr(storage_chunks, "AT_ONCE", 100 * 50 * 4)
    real, met = zarr_files._array, threading.Barrier(together)
    monkeypatch.setattr(zarr_files, "_array", lambda matrix: Meeting(real(matrix), met))
    np.testing.assert_array_equal(zarr_files.read(matrix, where, together), X[where])


def test_threads_hold_no_more_decoded_chunks_than_allowed(tmp_path, monkeypatch):
    zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(100, 50))
    matrix = inspect(tmp_path / "x.zarr")
    for most, threads in ((1, 1), (3 * matrix.storage.decoding, 3), (10**9, 8)):
        monkeypatch.setattr(zarr_files, "DECODED", most)
        assert zarr_files._at_a_time(matrix, 8) == threads


def test_a_gpu_worker_decodes_in_less_time_than_one_thread():
    a = tall((40_000, 40_000), (4000, 4000), "other")
    gpu = ClusterSpec.homogeneous(H200, 1, NVLINK)
    problem = Problem(a, a, rereadable=(True, True))
    plan = plan_matmul(problem, gpu)
    assert reading.seconds(plan.layout, gpu) == pytest.approx(
        reading.seconds(plan.layout, replace(gpu, devices=(replace(H200, kind="cpu"),)))
        / reading.READERS_TOGETHER
    )


def test_plans_count_what_reading_holds_and_takes():
    plan = planned(tall(), MatrixSpec((1000, 1000)), cpus(2e9, 2, threads=2))
    assert plan.memory_terms["reading storage chunks"] >= 2 * 40e6
    assert plan.time_terms["decoding"] >= 0.8e9 / (2 * 2 * reading.RATES[""][0])
    slow = planned(tall(codec="slow"), MatrixSpec((1000, 1000)), cpus(2e9, 2, threads=2))
    assert slow.time_terms["decoding"] > 2 * plan.time_terms["decoding"]


@pytest.mark.parametrize(("memory", "least"), [(0.512e9, 1.5), (1e9, 1.5)])
def test_fewer_chunks_are_decoded_along_chunks(memory, least):
    """As many as half, or fewer, than in the blocks of files in one piece."""
    b, cluster = MatrixSpec((1000, 1000)), cpus(memory)
    plan = planned(tall(), b, cluster)
    usual = planned(MatrixSpec((200_000, 1000)), b, cluster).layout
    as_usual = replace(usual, problem=replace(usual.problem, a=tall()))
    assert plan.fits
    assert least * reading.decodes(plan.layout, "a") <= reading.decodes(as_usual, "a")


# ------------------------------------------------------- what is refused


def test_storage_chunks_beyond_a_workers_memory_are_refused_in_one_line():
    with pytest.raises(MemoryBudgetError) as refused:
        planned(tall(chunk=(200_000, 500)), MatrixSpec((1000, 1000)), cpus(0.512e9))
    text = str(refused.value)
    assert "\n" not in text
    assert "A is stored in chunks of 400 MB" in text
    assert "241 MB of its 512 MB" in text
    assert "rechunk the store to 121 MB or less" in text
    needed = 0.512e9 + (400e6 - 241.2e6) / 0.6
    assert f"more than {needed / 1e6:.0f} MB" in text
    planned(tall(chunk=(200_000, 500)), MatrixSpec((1000, 100)), cpus(needed * 1.3))


def test_a_product_says_so_at_the_call(tmp_path):
    """Not when it is computed: a chunk may be far larger than the array."""
    edge = 10**6
    zarr.create_array(tmp_path / "x.zarr", shape=(60, 60), chunks=(edge, edge), dtype="f4")
    lazy = multimm.io.open_array(tmp_path / "x.zarr")
    with pytest.raises(MemoryBudgetError, match="rechunk the store"):
        multimm.matmul(lazy, lazy)


# ------------------------------------------------------- workers that a nanny ends at their limit


@pytest.mark.parametrize(
    ("megabytes", "form", "codec"),
    [(40, "tall", "none"), pytest.param(20, "wide", "zstd", marks=pytest.mark.slow)],
)
def test_no_worker_is_killed_whose_plan_fits(tmp_path, monkeypatch, megabytes, form, codec):
    from multimm_benchmarks import storage_chunks

    monkeypatch.setattr(storage_chunks, "LEAST", 80e6)
    case = storage_chunks.Case(megabytes, form, codec, True, "<f4", 512_000_000, 1, 1)
    found = storage_chunks.run(case, tmp_path)
    assert found.fits
    assert (found.killed, found.right) == (0, True), found.text


# ------------------------------------------------------- tasks that read


@pytest.mark.parametrize("codec", [None, zarr.codecs.ZstdCodec(), zarr.codecs.GzipCodec()])
@pytest.mark.parametrize("stands", ["cut short", "noise"])
def test_damaged_chunks_are_errors(tmp_path, codec, stands):
    array = zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(100, 50), compressors=codec)
    path = tmp_path / "x.zarr" / array.metadata.encode_chunk_key((1, 1))
    content = {"cut short": path.read_bytes()[:-3], "noise": RNG.bytes(500)}
    path.write_bytes(content[stands])
    with pytest.raises(FileFormatError, match="cannot be read"):
        graph.read_block(inspect(tmp_path / "x.zarr"), (slice(7, 170), slice(3, 144)))


@pytest.mark.parametrize(
    "options", [{"compressors": None}, {}, {"shards": (200, 100)}, {"zarr_format": 2}]
)
def test_an_empty_file_in_place_of_a_chunk_is_no_fill_value(tmp_path, options):
    array = zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(100, 50), **options)
    path = tmp_path / "x.zarr" / array.metadata.encode_chunk_key((1, 1))
    path.write_bytes(b"")
    with pytest.raises(FileFormatError, match=f"^{path}: an empty file in place of a chunk"):
        inspect(tmp_path / "x.zarr")
    path.unlink()  # where the fill value is meant
    block = slice(200, 210), slice(100, 110)
    assert not graph.read_block(inspect(tmp_path / "x.zarr"), block).all()


@pytest.mark.parametrize(("given", "used"), [(True, 5), (False, 1)])
def test_workers_with_a_gpu_read_by_several_threads_whatever_they_read_to(monkeypatch, given, used):
    worker = SimpleNamespace(plugins={"x": type("P", (), {"__module__": "dask_cuda.plugins"})()})
    monkeypatch.setattr(graph, "threads_beside_a_gpu", lambda most: min(most, 5))
    monkeypatch.setattr("distributed.get_worker", lambda: worker)
    if not given:
        worker.plugins = {}
    assert graph._threads(gpu=False) == used


def test_blocks_of_few_chunks_are_read_beside_each_other(tmp_path, monkeypatch):
    zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(100, 50))
    monkeypatch.setattr(graph, "_threads", lambda gpu: 4)
    real = zarr_files._array
    met = threading.Barrier(1 + graph.BESIDE)
    monkeypatch.setattr(zarr_files, "_array", lambda matrix: Meeting(real(matrix), met))
    at = [(slice(row, row + 100), slice(0, 50)) for row in (0, 100, 200)]
    reader = graph.Reader(inspect(tmp_path / "x.zarr"), gpu=False)
    with (
        LocalCluster(1, processes=False, threads_per_worker=1, dashboard_address=":0") as cluster,
        cluster.get_client() as client,
    ):
        tasks = [client.submit(reader.part(where), where) for where in at]
        for where, block in zip(at, client.gather(tasks), strict=True):
            np.testing.assert_array_equal(block, X[where])
    assert graph._beside._value == graph.BESIDE


def test_blocks_of_many_chunks_keep_their_workers_thread(tmp_path, monkeypatch):
    zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(10, 10))
    monkeypatch.setattr("distributed.secede", lambda: pytest.fail("left"))
    whole = tuple(slice(0, size) for size in X.shape)
    reader = graph.Reader(inspect(tmp_path / "x.zarr"), gpu=False).part(whole)
    with graph._beside_other_tasks(reader.matrix, 16):
        pass
