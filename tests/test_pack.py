"""Packing without a GPU: layouts, tasks, blocks and their checks, the way through Dask."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from commands import python
from cuda_on_cpu.packing import numbers, places
from hypothesis import given
from hypothesis import strategies as st
from kernel_maths import functions_of
from pack_reference import joined, pack_reference, split
from stand_in import LAYOUTS, GPUArray, Kernel, gpu, laid_out

from multimm.errors import ArrayTypeError, DTypeError, OptionError, ShapeError
from multimm.gpu.arch import ARCHITECTURES
from multimm.gpu.emulated import configs, packed
from multimm.gpu.emulated import pack as emulated_pack
from multimm.gpu.emulated.configs import PARTS, tiles_for
from multimm.gpu.emulated.pack import (
    cut_for,
    held_on,
    pack,
)
from multimm.gpu.emulated.packed import PackedBlock, check_pair
from multimm.gpu.runtime.kernel_source import kernel_text

pytestmark = pytest.mark.usefixtures("gpu_in_numpy")


def given_as(x: np.ndarray, side: str, trans: bool) -> np.ndarray:
    """The array that op(A), or op(B) transposed, x is packed from."""
    return x if (side == "a") != trans else x.T


@pytest.fixture(autouse=True, scope="module")
def many_residuals():
    """Odd numbers, too, stay packed, and so few that the source would be kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_pack, "SPLIT_K", 0)
        for module in (configs, emulated_pack, packed):
            patch.setattr(module, "RESIDUAL_CAP", 65_536)
        yield


def assert_packed(block: PackedBlock, x: np.ndarray) -> None:
    expected = pack_reference(x, PARTS[block.scheme])
    assert block.raw is None
    assert block.tiles.tobytes() == expected.tiles.tobytes()
    assert (block.exponents == expected.exponents).all()
    assert (block.nonfinite, block.uncarried) == (0, expected.uncarried)
    if block.uncarried:
        order = np.argsort(block.places)
        assert (block.places[order] == places(expected.residuals)).all()
        assert (block.values[order] == expected.residuals["value"]).all()
    else:
        assert block.places is block.values is None


@given(
    st.sampled_from("ab"), st.booleans(), st.sampled_from(["float32", "tf32"]),
    st.integers(0, 200), st.integers(0, 200), st.sampled_from(LAYOUTS),
    st.sampled_from(["normal", "sparse", "odd"]),
)  # fmt: skip
def test_every_layout_is_packed_as_the_operand(side, trans, scheme, rows, k, layout, kind):
    Kernel.forget()
    x = numbers(kind, rows, k, np.random.default_rng(rows + k))
    x[~np.isfinite(x)] = 3
    values = laid_out(given_as(x, side, trans), layout)
    block = pack(values, side=side, trans=trans, scheme=scheme)
    assert block.shape == ((rows, k) if side == "a" else (k, rows))
    assert_packed(block, x)
    assert len(Kernel.launches) == (rows * k > 0)
    back = np.asarray(block.unpack())
    parts = split(x, PARTS[scheme])
    assert (back == (joined(parts) if side == "a" else joined(parts).T)).all()
    assert back.shape == block.shape


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("layout", ["C", "F", "wide columns", "every second"])
def test_what_is_not_finite_keeps_the_source(bad, layout):
    x = numbers("normal", 40, 30, np.random.default_rng(7))
    x[2, 3] = x[20, 9] = bad
    for side, trans in itertools.product("ab", (False, True)):
        values = laid_out(given_as(x, side, trans), layout)
        block = pack(values, side=side, trans=trans)
        assert block.nonfinite == 2
        assert block.tiles is block.exponents is block.places is None
        assert block.shape == ((40, 30) if side == "a" else (30, 40))
        np.testing.assert_array_equal(block.raw, x if side == "a" else x.T)
        assert block.unpack() is block.raw
        assert not np.shares_memory(block.raw, values)
        assert block.nbytes == 40 * 30 * 4


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_short_k_keeps_the_source_where_the_promise_needs_it(monkeypatch, side, layout):
    monkeypatch.setattr(emulated_pack, "SPLIT_K", 256)
    x = numbers("normal", 70, 255, np.random.default_rng(8))
    values = laid_out(given_as(x, side, False), layout)
    block = pack(values, side=side)
    assert Kernel.launches == []
    np.testing.assert_array_equal(block.raw, given_as(x, side, False))
    assert not np.shares_memory(block.raw, values)
    assert (block.nonfinite, block.uncarried) == (0, 0)
    assert pack(values, side=side, scheme="tf32").raw is None
    assert_packed(pack(gpu(np.ones((256, 3), "f4")), side="b"), np.ones((3, 256), "f4"))


@given(
    st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(ARCHITECTURES),
    st.integers(1, 200),
)  # fmt: skip
def test_tasks_cover_every_slab_of_every_panel(rows, k, limits, multiprocessors):
    held, (panels, slabs) = held_on(limits), tiles_for(rows, k)
    cut = cut_for(rows, k, held, multiprocessors)
    assert panels * 64 == -(-rows // 128) * 128
    assert slabs == -(-k // 64)
    if not panels * slabs:
        assert cut.tasks == 0
        return
    blocks = -(-slabs // cut.run)
    assert 1 <= cut.run <= held
    assert cut.tasks == panels * blocks
    assert cut.at_once == (blocks <= multiprocessors)
    # The device is full, or no block has less to do.
    assert cut.run in (1, held) or cut.tasks > multiprocessors * emulated_pack.BLOCKS // 2


def test_threads_read_exchange_and_write_each_element_once_without_conflicts():
    names = functions_of(kernel_text("common/pack_map.cuh", {}))
    line_of, place_in_line, shared_place, turned_place, swizzle = (
        names[x] for x in (
            "line_of_thread", "place_in_line", "shared_place", "turned_place", "swizzled",
        )
    )  # fmt: skip
    threads, tile = names["THREADS"], names["TILE"]
    assert (threads, tile) == (256, 64)
    for wide in (0, 1):
        read = Counter(
            (line_of(t, i), place_in_line(wide, t, e))
            for t in range(threads) for i in range(4) for e in range(4)
        )  # fmt: skip
        assert len(read) == tile * tile == read.total()
        assert not wide or all(place_in_line(1, t, 0) % 4 == 0 for t in range(threads))
    for place in (shared_place, turned_place):
        assert {place(row, four) for row in range(tile) for four in range(16)} == set(range(1024))

    def banks(slots):
        return {slot % 8 for slot in slots}  # 4 banks each: 16 bytes

    for first, j in itertools.product(range(0, threads, 8), range(4)):  # 8 threads at a time
        eight = range(first, first + 8)
        along_k = [shared_place(line_of(t, j), place_in_line(1, t, 0) // 4) for t in eight]
        across = [turned_place(place_in_line(1, t, j), line_of(t, 0) // 4) for t in eight]
        assert len(banks(along_k)) == len(banks(across)) == 8
        for place, half in itertools.product((shared_place, turned_place), (0, 1)):
            assert len(banks(place(t // 8, t % 8 * 2 + half) for t in eight)) == 8
    written = {swizzle(row, vector) for row in range(tile) for vector in range(8)}
    assert written == set(range(0, tile * tile, 8))
    r, c = np.divmod(np.arange(tile * tile), tile)
    contract = (r * 128 + ((2 * c) ^ ((r & 7) << 4))) // 2
    assert [swizzle(int(i), int(j) // 8) + int(j) % 8 for i, j in zip(r, c, strict=True)] == (
        contract.tolist()
    )


def test_bad_input_is_refused_before_anything_runs():
    x = gpu(np.ones((4, 6), "f4"))
    for error, sentence, call in (
        (DTypeError, "dtype float64", lambda: pack(gpu(np.ones((2, 2))), side="a")),
        (ArrayTypeError, "move it with cupy.asarray", lambda: pack(np.ones((2, 2)), side="a")),
        (ShapeError, "one matrix", lambda: pack(gpu(np.ones((2, 3, 4), "f4")), side="a")),
        (ShapeError, "one matrix", lambda: pack(x[0], side="b")),
        (OptionError, "side is 'c'", lambda: pack(x, side="c")),
        (OptionError, "scheme is 'ieee'", lambda: pack(x, side="a", scheme="ieee")),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()
    assert Kernel.launches == []


def test_repeated_elements_are_copied():
    row = numbers("normal", 1, 90, np.random.default_rng(3))
    block = pack(np.broadcast_to(gpu(row), (5, 90)).view(GPUArray), side="a")
    assert_packed(block, np.ascontiguousarray(np.broadcast_to(row, (5, 90))))


def test_pairs_that_do_not_fit_are_refused():
    x = gpu(np.ones((4, 6), "f4"))
    a, b = pack(x, side="a"), pack(x, side="b", trans=True)
    check_pair(a, b)
    far = pack(x, side="b", trans=True)
    for array in far.arrays().values():
        array.device_id = 1
    for error, sentence, pair in (
        (ArrayTypeError, "b is a cupy.GPUArray: pack it first", (a, x)),
        (OptionError, 'b was packed as operand "a"', (a, a)),
        (OptionError, "a was packed for float32 and b for tf32", (
            a, pack(x, side="b", trans=True, scheme="tf32"))),
        (ShapeError, "the 6 columns of a must equal the 4 rows of b", (a, pack(x, side="b"))),
        (ArrayTypeError, "a lies on device 0, b on device 1", (a, far)),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            check_pair(*pair)


def block_of(kind: str, side: str = "a", scheme: str = "float32") -> PackedBlock:
    x = numbers(kind, 70, 90, np.random.default_rng(11))
    return pack(gpu(given_as(x, side, False)), side=side, scheme=scheme)


BLOCKS = [("normal", "a", "float32"), ("wide", "b", "float32"), ("sparse", "b", "tf32"),
          ("odd", "a", "float32"), ("odd", "b", "tf32")]  # fmt: skip


def assert_same(one: PackedBlock, other: PackedBlock) -> None:
    plain = ("rows", "k", "side", "scheme", "nonfinite", "uncarried", "shape", "nbytes")
    assert [getattr(one, x) for x in plain] == [getattr(other, x) for x in plain]
    assert one.arrays().keys() == other.arrays().keys()
    for name, x in one.arrays().items():
        assert x.tobytes("A") == other.arrays()[name].tobytes("A")


def as_frames(x):
    """As distributed sends CuPy's arrays: what describes one, and its memory."""
    header = {"dtype": x.dtype.str, "shape": x.shape, "strides": x.strides}
    return header, [memoryview(x.tobytes("A"))]


def from_frames(header, frames):
    (frame,) = frames
    x = np.ndarray(header["shape"], header["dtype"], bytearray(frame), strides=header["strides"])
    return x.view(GPUArray)


@pytest.mark.parametrize("kind", BLOCKS, ids=str)
@pytest.mark.parametrize("family", ["dask", "cuda", "pickle"])
def test_blocks_travel_and_come_back(kind, family):
    from dask.sizeof import sizeof
    from distributed.protocol import deserialize, serialize
    from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    for register in (cuda_serialize, dask_serialize):
        register.register(GPUArray)(as_frames)
    for register in (cuda_deserialize, dask_deserialize):
        register.register(GPUArray)(from_frames)
    packed._register()
    block = block_of(*kind)
    if block.raw is not None and kind[1] == "a":
        turned = laid_out(np.asarray(block.raw), "F")
        block = PackedBlock(70, 90, "a", kind[2], nonfinite=block.nonfinite, raw=turned)
    assert sizeof(block) == block.nbytes > 70 * 90 * 2
    header, frames = serialize(block, serializers=(family,), on_error="raise")
    assert header["serializer"] == family
    if family != "pickle":
        assert len(frames) == len(block.arrays())
        assert sum(len(frame) for frame in frames) == block.nbytes
    frames = [bytearray(frame) for frame in frames]
    assert_same(deserialize(header, frames), block)


def test_dask_cuda_counts_a_block_as_device_memory(monkeypatch):
    registered = {}
    module = ModuleType("dask_cuda.is_device_object")
    module.is_device_object = SimpleNamespace(
        register=lambda kind: lambda answer: registered.setdefault(kind, answer)
    )
    monkeypatch.setitem(sys.modules, "dask_cuda", ModuleType("dask_cuda"))
    monkeypatch.setitem(sys.modules, "dask_cuda.is_device_object", module)
    packed._register.cache_clear()
    packed._register()
    assert registered[PackedBlock](block_of("normal")) is True


def test_packing_loads_no_distributed_and_registers_where_it_is_loaded():
    code = (
        "import sys, multimm.gpu.emulated.pack as p; assert 'distributed' not in sys.modules; "
        "from distributed.protocol.serialize import dask_serialize; p.register_with_dask(); "
        "dask_serialize.dispatch(p.PackedBlock); print('registered')"
    )
    assert_registers(code)


def test_a_worker_that_packs_nothing_knows_packed_blocks_from_their_type():
    name = pickle.dumps(PackedBlock)
    assert_registers(
        "import pickle, sys, distributed; assert 'multimm' not in sys.modules; "
        "from distributed.protocol.cuda import cuda_deserialize; "
        f"kind = pickle.loads({name!r}); assert 'multimm.gpu.emulated.pack' not in sys.modules; "
        "cuda_deserialize.dispatch(kind); print('registered')"
    )


def test_a_client_that_packed_before_it_had_a_cluster_can_receive_packed_blocks():
    assert_registers(
        "import multimm.gpu.emulated.pack as p, multimm, sys; "
        "assert 'distributed' not in sys.modules; "
        "from distributed import Client; client = Client(processes=False, dashboard_address=None);"
        "multimm.cluster.connect(client); "
        "from distributed.protocol.cuda import cuda_deserialize; "
        "cuda_deserialize.dispatch(p.PackedBlock); client.close(); print('registered')"
    )


def assert_registers(code):
    run = python("-c", code)
    assert run.stdout == "registered\n", run.stderr
