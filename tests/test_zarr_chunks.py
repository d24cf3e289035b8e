"""Chunks that are decoded without Zarr: the values that Zarr reads, and its errors."""

from __future__ import annotations

import json
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import LocalCluster

from multimm.errors import FileFormatError
from multimm.files import graph, locate, zarr_chunks
from multimm.files import zarr as zarr_files
from multimm.files.zarr_chunks import UNTOUCHED, WholeChunks
from multimm.files.zarr_metadata import Encoding, written

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")
codecs = pytest.importorskip("zarr.codecs")
RNG = np.random.default_rng(0)
SHAPE, CHUNKS = (70, 45), (20, 15)
WHERE = (slice(7, 70), slice(3, 44))
OURS = {
    "uncompressed": {"compressors": None},
    "zstd": {"compressors": codecs.ZstdCodec(level=3)},
    "blosc": {"compressors": codecs.BloscCodec(cname="lz4")},
    "gzip": {"compressors": codecs.GzipCodec(level=1)},
    "big-endian": {"serializer": codecs.BytesCodec(endian="big"), "compressors": None},
    "2, zstd": {"zarr_format": 2, "compressors": numcodecs.Zstd()},
    "2, lz4": {"zarr_format": 2, "compressors": numcodecs.LZ4()},
    "2, zlib": {"zarr_format": 2, "compressors": numcodecs.Zlib()},
    "2, uncompressed": {"zarr_format": 2, "compressors": None},
    "2, big-endian": {"zarr_format": 2, "dtype": ">f4"},
    "one byte": {"dtype": "uint8"},
    "version 2's names of files": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "complex": {"dtype": "complex128"},
}
ZARRS = {
    "two codecs": {"compressors": [codecs.ZstdCodec(), codecs.Crc32cCodec()]},
    "transposed": {"filters": codecs.TransposeCodec(order=(1, 0))},
    "shards": {"shards": (40, 30)},
    "2, columns": {"zarr_format": 2, "order": "F"},
    "2, filter": {"zarr_format": 2, "filters": numcodecs.Delta(dtype="f4")},
    "2, bz2": {"zarr_format": 2, "compressors": numcodecs.BZ2()},
}


def stored(path, more):
    """An array, and its values."""
    dtype = np.dtype(more.get("dtype", "f4"))
    values = RNG.integers(0, 100, SHAPE).astype(dtype)
    array = zarr.create_array(
        path, shape=SHAPE, chunks=CHUNKS, fill_value=7, **({"dtype": dtype} | more)
    )
    array[:] = values
    return array, values


def decodes(monkeypatch) -> list[bool]:
    """Of each chunk that is decoded from now on: whether it was, or was left to Zarr."""
    found, decode = [], WholeChunks._decode

    def noted(self, path, decoded):
        found.append(decode(self, path, decoded))
        return found[-1]

    monkeypatch.setattr(WholeChunks, "_decode", noted)
    return found


def read(path, where=WHERE, threads=1):
    return zarr_files.read(zarr_files.inspect(locate(str(path), None)), where, threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", OURS)
def test_chunks_are_what_zarr_reads(tmp_path, monkeypatch, kind, threads):
    array, values = stored(tmp_path / "x.zarr", OURS[kind])
    found = decodes(monkeypatch)
    block = read(tmp_path / "x.zarr", threads=threads)
    assert found == [True] * 4 * 3
    np.testing.assert_array_equal(block, values[WHERE])
    assert block.dtype == array[WHERE].dtype


@pytest.mark.parametrize("kind", ZARRS)
def test_other_chunks_are_left_to_zarr(tmp_path, monkeypatch, kind):
    _, values = stored(tmp_path / "x.zarr", ZARRS[kind])
    found = decodes(monkeypatch)
    np.testing.assert_array_equal(read(tmp_path / "x.zarr"), values[WHERE])
    assert found == []


REGULAR = {"name": "regular", "configuration": {"chunk_shape": [2, 3]}}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
VERSION_3 = {"zarr_format": 3, "data_type": "int16", "chunk_grid": REGULAR, "codecs": [LITTLE]}
VERSION_2 = {"dtype": ">f8", "chunks": [2, 3], "order": "C", "compressor": None, "filters": None}


@pytest.mark.parametrize(
    ("more", "dtype", "codec"),
    [
        ({}, "<i2", None),
        ({"data_type": "uint8", "codecs": ["bytes", {"name": "zstd"}]}, "u1", "zstd"),
        ({"codecs": [LITTLE, {"name": "numcodecs.lz4", "configuration": {}}]}, "<i2", "lz4"),
    ],
)
def test_version_3_is_understood(tmp_path, more, dtype, codec):
    (tmp_path / "zarr.json").write_text(json.dumps(VERSION_3 | more))
    assert written(str(tmp_path)) == Encoding(np.dtype(dtype), (2, 3), codec)


@pytest.mark.parametrize(
    "more",
    [
        {"data_type": "bfloat16"},
        {"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "s"}}},
        {"chunk_grid": {"name": "rectilinear", "configuration": {"chunk_shapes": [[2], [3]]}}},
        {"chunk_grid": "regular"},
        {"codecs": ["bytes"]},  # of which order?
        {"codecs": []},
        {"codecs": [LITTLE, "zstd"]},
        {"codecs": [LITTLE, {"name": "lz4"}]},  # nothing says that it is numcodecs' format
        {"codecs": [LITTLE, {"name": "zstd"}, {"name": "crc32c"}]},
        {"codecs": [{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE]},
        {"storage_transformers": [{"name": "new"}]},
    ],
)
def test_what_version_3_may_say_else_is_left_to_zarr(tmp_path, more):
    (tmp_path / "zarr.json").write_text(json.dumps(VERSION_3 | more))
    (tmp_path / ".zarray").write_text(json.dumps(VERSION_2))  # is not looked at
    assert written(str(tmp_path)) is None


def test_version_2_is_understood(tmp_path):
    for more, codec in ({}, None), ({"compressor": {"id": "zlib"}, "filters": []}, "zlib"):
        (tmp_path / ".zarray").write_text(json.dumps(VERSION_2 | more))
        assert written(str(tmp_path)) == Encoding(np.dtype(">f8"), (2, 3), codec)


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "|S8"},
        {"dtype": "x"},
        {"dtype": ""},
        {"dtype": [["x", "<f4"]]},
        {"order": "F"},
        {"filters": [{"id": "delta"}]},
        {"compressor": {"id": "bz2"}},
        {"compressor": "zstd"},
    ],
)
def test_what_version_2_may_say_else_is_left_to_zarr(tmp_path, more):
    (tmp_path / ".zarray").write_text(json.dumps(VERSION_2 | more))
    assert written(str(tmp_path)) is None


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"\xff", b"null"])
def test_damaged_metadata_are_left_to_zarr(tmp_path, content):
    (tmp_path / "zarr.json").write_bytes(content)
    assert written(str(tmp_path)) is None
    assert written(str(tmp_path / "nothing")) is None


def test_a_box_that_is_a_chunk_is_decoded_in_place(tmp_path, monkeypatch):
    _, values = stored(tmp_path / "x.zarr", {"compressors": None})
    monkeypatch.setattr(zarr_chunks, "SCRATCH", None)
    where = (slice(20, 40), slice(15, 30))
    np.testing.assert_array_equal(read(tmp_path / "x.zarr", where), values[where])


def test_chunks_that_are_missing_hold_the_fill_value(tmp_path, monkeypatch):
    array, values = stored(tmp_path / "x.zarr", {})
    os.unlink(tmp_path / "x.zarr" / array.metadata.encode_chunk_key((1, 1)))
    values[20:40, 15:30] = 7
    found = decodes(monkeypatch)
    np.testing.assert_array_equal(read(tmp_path / "x.zarr"), values[WHERE])
    assert found.count(False) == 1


@pytest.mark.parametrize("codec", ["uncompressed", "zstd", "blosc", "gzip"])
@pytest.mark.parametrize("stands", ["cut short", "noise", "empty", "of fewer values", "of more"])
def test_damaged_chunks_are_errors(tmp_path, codec, stands):
    array, _ = stored(tmp_path / "x.zarr", OURS[codec])
    path = tmp_path / "x.zarr" / array.metadata.encode_chunk_key((1, 1))
    content = path.read_bytes()
    if stands in ("of fewer values", "of more"):
        chunks = (19, 15) if stands == "of fewer values" else (21, 15)
        other = tmp_path / "other.zarr"
        more = {"dtype": "f4", **OURS[codec]}
        zarr.create_array(other, shape=chunks, chunks=chunks, **more)[:] = 1
        content = next(other.rglob("c/0/0")).read_bytes()
    path.write_bytes(
        {"cut short": content[:-3], "noise": RNG.bytes(500), "empty": b""}.get(stands, content)
    )
    matrix = zarr_files.inspect(locate(str(tmp_path / "x.zarr"), None))
    with pytest.raises(FileFormatError, match="cannot be read"):
        graph.read_block(matrix, WHERE)


def test_a_chunk_that_ends_as_an_untouched_one_is_right(tmp_path, monkeypatch):
    array, values = stored(tmp_path / "x.zarr", {"dtype": "uint8"})
    array[:] = values = np.full_like(values, UNTOUCHED)
    found = decodes(monkeypatch)
    np.testing.assert_array_equal(read(tmp_path / "x.zarr"), values[WHERE])
    assert found.count(False) == 3 * 3  # chunks at an edge end with the fill value


@pytest.mark.parametrize(("given", "used"), [(True, 5), (False, 1)])
def test_workers_with_a_gpu_read_by_several_threads_whatever_they_read_to(monkeypatch, given, used):
    worker = SimpleNamespace(plugins={"x": type("P", (), {"__module__": "dask_cuda.plugins"})()})
    monkeypatch.setattr(graph, "threads_beside_a_gpu", lambda most: min(most, 5))
    monkeypatch.setattr("distributed.get_worker", lambda: worker)
    if not given:
        worker.plugins = {}
    assert graph._threads(gpu=False) == used


def test_blocks_of_few_chunks_are_read_beside_each_other(tmp_path, monkeypatch):
    _, values = stored(tmp_path / "x.zarr", {})
    matrix = zarr_files.inspect(locate(str(tmp_path / "x.zarr"), None))
    monkeypatch.setattr(graph, "_threads", lambda gpu: 4)
    met, decode = threading.Barrier(1 + graph.BESIDE), WholeChunks._decode

    def meet(self, path, decoded):
        met.wait(30)  # raises if fewer come
        return decode(self, path, decoded)

    monkeypatch.setattr(WholeChunks, "_decode", meet)
    at = [(slice(row, row + 20), slice(0, 15)) for row in (0, 20, 40)]
    reader = graph.Reader(matrix, gpu=False)
    with (
        LocalCluster(1, processes=False, threads_per_worker=1, dashboard_address=":0") as cluster,
        cluster.get_client() as client,
    ):
        tasks = [client.submit(reader.part(where), where) for where in at]
        for where, block in zip(at, client.gather(tasks), strict=True):
            np.testing.assert_array_equal(block, values[where])
    assert graph._beside._value == graph.BESIDE


def test_blocks_of_many_chunks_keep_their_workers_thread(tmp_path, monkeypatch):
    stored(tmp_path / "x.zarr", {})
    matrix = zarr_files.inspect(locate(str(tmp_path / "x.zarr"), None))
    monkeypatch.setattr("distributed.secede", lambda: pytest.fail("left"))
    with graph._beside_other_tasks(graph.Reader(matrix, gpu=False).part(WHERE).matrix, 16):
        pass
