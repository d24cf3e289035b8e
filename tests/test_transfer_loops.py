"""The loops that copy between host memory and a GPU, on a driver whose copies land late.

What was ordered is copied when its event is waited for, or at the end: a piece that is filled again
too early, or emptied, gives other bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, c_int, c_size_t
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from clusters import soon
from commands import python
from numba import njit

from multimm.gpu.transfer import loops, pinned_copy

PIECE = 64  # bytes
COMPILED = "multimm.gpu.transfer.compiled_loops"

#: Copies with the loops, on a driver whose functions lie elsewhere in each process.
COPIES = """
import numpy as np
from test_transfer_loops import PIECE, LateDriver, loops

driver = LateDriver()
loops._driver = lambda: driver
x, back = np.arange(PIECE, dtype=np.uint8), np.zeros(PIECE, np.uint8)
pieces = [np.zeros(PIECE, np.uint8) for _ in range(2)]
ends = [piece.ctypes.data for piece in pieces] + [1, 2, 99]
made = loops.loops()
failed = made.fetch(back.ctypes.data, x.ctypes.data, PIECE, PIECE, 0, 1, *ends)
ways = [getattr(made, name) for name in made._fields]
taken = all(way.stats.cache_hits for way in ways)
assert taken or not any(way.stats.cache_hits for way in ways)
assert not failed and (x == back).all()
print("taken" if taken else "compiled")
"""


class LateDriver:
    """What the loops call of the CUDA driver: addresses are those of NumPy's arrays."""

    def __init__(self) -> None:
        self.begin()
        word = c_size_t
        self.cuMemcpyHtoDAsync_v2 = CFUNCTYPE(c_int, word, word, word, word)(self.copy)
        self.cuMemcpyDtoHAsync_v2 = CFUNCTYPE(c_int, word, word, word, word)(self.copy)
        self.cuEventRecord = CFUNCTYPE(c_int, word, word)(self.record)
        self.cuEventSynchronize = CFUNCTYPE(c_int, word)(self.wait)
        self.cuStreamWaitEvent = CFUNCTYPE(c_int, word, word, word)(self.order)
        self.cuStreamSynchronize = CFUNCTYPE(c_int, word)(self.finish)

    def begin(self, at_once=False):
        """Forget what was; copies land late, or at once."""
        self.ordered, self.recorded, self.fails_after = [], {}, 10**6
        self.shares = []  # copies of each lane
        self.ready, self.late = [], 0  # events that streams were to wait for; what that returns
        self.at_once = at_once

    def copy(self, target, source, size, stream):
        self.fails_after -= 1
        if self.fails_after < 0:
            return 7
        assert stream == 99
        if self.at_once:
            ctypes.memmove(target, source, size)
        else:
            self.ordered.append((target, source, size))
        return 0

    def record(self, event, stream):
        self.recorded[event] = len(self.ordered)
        return 0

    def wait(self, event):
        self.land(self.recorded.get(event, 0))
        return 0

    def order(self, stream, event, flags):
        assert stream == 99
        self.ready.append(event)
        return self.late

    def finish(self, stream):
        self.land(len(self.ordered))
        return 0

    def land(self, count):
        for n, copy in enumerate(self.ordered[:count]):
            if copy:
                ctypes.memmove(*copy)
                self.ordered[n] = None


@pytest.fixture(scope="module")
def compiled():
    """A driver, and the loops compiled for it, which takes a second."""
    driver = LateDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "_driver", lambda: driver)
        patch.delitem(sys.modules, COMPILED, raising=False)
        # Code that is kept could be the one that calls the real driver.
        patch.setattr(numba, "njit", lambda *types, cache=True, **given: njit(*types, **given))
        driver.loops = loops._compiled.__wrapped__()
        patch.delitem(sys.modules, COMPILED)
    return driver


@pytest.mark.slow
def test_what_one_process_has_compiled_another_one_takes(tmp_path):
    """Addresses of the driver's functions differ from process to process."""
    script = tmp_path / "copies.py"
    script.write_text(f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n{COPIES}")

    def said():
        return python(script, env={"NUMBA_CACHE_DIR": str(tmp_path / "kept")}).stdout

    assert [said(), said()] == ["compiled\n", "taken\n"]
    for file in (tmp_path / "kept").rglob("*.nb?"):
        file.write_bytes(b"half")
    assert said() == "compiled\n"


@pytest.fixture
def driver(compiled, monkeypatch):
    compiled.begin()
    monkeypatch.setattr(pinned_copy, "PIECE", PIECE)
    return compiled


def run(driver, way, *args, lanes_used=3):
    """Each lane's share, one lane after another; what they return."""
    loop = getattr(driver.loops, way)
    failed = []
    for lane in range(lanes_used):
        pieces = [np.full(PIECE, 255, np.uint8) for _ in range(2)]
        ends = [piece.ctypes.data for piece in pieces] + [1, 2, 99]
        driver.recorded.clear()
        failed.append(loop(*args, lane, lanes_used, *ends))
        driver.shares.append(len(driver.ordered))
        driver.land(len(driver.ordered))
        driver.ordered.clear()
    return failed


def there(target, shape=None):
    """A NumPy array as if it were on a device."""
    data = SimpleNamespace(ptr=target.ctypes.data)
    return SimpleNamespace(data=data, shape=shape or target.shape, nbytes=target.nbytes)


def table(arrays):
    """What `send` is told of targets and sources."""
    parts = []
    for target, source in arrays:
        block = pinned_copy._in_rows(source)
        assert np.shares_memory(block, source) or not block.size
        own = target[: block.nbytes]
        parts.append(pinned_copy._all_of(there(own, block.shape), block))
    return np.array(parts, np.int64)


SIZES = [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 7 * PIECE + 5, 40 * PIECE - 1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lanes_used", [1, 3])
def test_every_byte_goes_up_and_comes_back(driver, size, lanes_used):
    x = np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)
    sent, back = np.zeros(size + 9, np.uint8), np.zeros(size + 9, np.uint8)
    assert not any(run(driver, "send", table([(sent, x)]), lanes_used=lanes_used))
    np.testing.assert_array_equal(sent[:size], x)
    down = back.ctypes.data, sent.ctypes.data, size, PIECE
    assert not any(run(driver, "fetch", *down, lanes_used=lanes_used))
    np.testing.assert_array_equal(back[:size], x)
    assert not sent[size:].any()
    assert not back[size:].any()


@pytest.mark.parametrize("row", [5, 31, 64])
def test_rows_that_lie_apart(driver, row):
    wide = np.random.default_rng(row).integers(0, 255, (50, 100), dtype=np.uint8)
    x = wide[3:40, 20 : 20 + row]
    sent = np.zeros(x.size + 9, np.uint8)
    assert not any(run(driver, "send", table([(sent, x)])))
    np.testing.assert_array_equal(sent[: x.size], x.reshape(-1))
    assert not sent[x.size :].any()


@pytest.mark.parametrize("columns", [(3, 7), (40, 60, 1), (200, 150), (1,)])
@pytest.mark.parametrize("lanes_used", [1, 3])
def test_blocks_are_joined_on_their_way(driver, columns, lanes_used):
    """Rows shorter and longer than a piece; of sources whose rows lie apart, backwards, or once."""
    rng, rows = np.random.default_rng(sum(columns)), (11, 30)
    x = rng.integers(0, 9999, (sum(rows), sum(columns)), np.int16)
    sent, parts, kept = np.zeros_like(x), [], []
    for i, height in enumerate(rows):
        for j, width in enumerate(columns):
            place = (slice(sum(rows[:i]), sum(rows[: i + 1])),
                     slice(sum(columns[:j]), sum(columns[: j + 1])))  # fmt: skip
            wide = rng.integers(0, 9999, (height + 3, width + 5), np.int16)
            block = [wide[2:-1, 1 : width + 1], wide[height::-1][1:, 2 : width + 2],
                     np.broadcast_to(wide[0, :width], (height, width))][(i + j) % 3]  # fmt: skip
            x[place] = block
            parts.append(pinned_copy._part_of(there(sent), pinned_copy._in_rows(block), place))
            kept.append(block)
    order = rng.permutation(len(parts))
    assert not any(run(driver, "send", np.array(parts, np.int64)[order], lanes_used=lanes_used))
    np.testing.assert_array_equal(sent, x)
    line, ends = np.zeros(x.size, x.dtype), [0, 3, 90, x.size]
    flat = x.reshape(-1)
    spans = [slice(*ends[at : at + 2]) for at in range(3)]
    parts = [pinned_copy._part_of(there(line), flat[span], (span,)) for span in spans]
    assert not any(run(driver, "send", np.array(parts, np.int64), lanes_used=lanes_used))
    np.testing.assert_array_equal(line, flat)


@pytest.mark.parametrize("lanes_used", [1, 2, 3, 8])
def test_arrays_of_all_kinds_go_up_together(driver, lanes_used):
    """Each lane goes on in the next array where its turn is."""
    wide = np.random.default_rng(5).integers(0, 255, (50, 100), dtype=np.uint8)
    flat = wide.reshape(-1)
    sources = [flat[:1], flat[:0], wide[3:40, 20:51], flat[7 : 5 * PIECE], wide[9:11, :5],
               flat[PIECE : 2 * PIECE], flat[5:3000]]  # fmt: skip
    targets = [np.zeros(x.size + 3, np.uint8) for x in sources]
    assert not any(run(driver, "send", table(zip(targets, sources, strict=True)),
                       lanes_used=lanes_used))  # fmt: skip
    for target, x in zip(targets, sources, strict=True):
        np.testing.assert_array_equal(target[: x.size], x.reshape(-1))
        assert not target[x.size :].any()
    assert max(driver.shares) - min(driver.shares) <= 1


@pytest.mark.parametrize("way", ["send", "fetch"])
def test_a_failure_is_returned_and_nothing_is_ordered_after_it(driver, way):
    size = 20 * PIECE
    x, y = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    driver.fails_after = 4
    down = y.ctypes.data, x.ctypes.data, size, PIECE
    args = [table([(y, x)])] if way == "send" else down
    failed = run(driver, way, *args, lanes_used=1)
    assert failed == [7]
    assert driver.fails_after == -1


@pytest.fixture
def road(driver, monkeypatch):
    """Three lanes whose copies land at once; 99 is their stream, as of one that is late."""
    driver.begin(at_once=True)

    class Lane:
        stream = SimpleNamespace(synchronize=lambda: None)

        def __init__(self, device):
            self.pieces = [np.full(PIECE, 255, np.uint8) for _ in range(2)]
            self.handles = [*(piece.ctypes.data for piece in self.pieces), 1, 2, 99]

    event = SimpleNamespace(record=lambda: None, ptr=5)
    failure = SimpleNamespace(CUDADriverError=RuntimeError)
    cuda = SimpleNamespace(
        Event=lambda **_: event, Device=lambda _: contextlib.nullcontext(), driver=failure
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(pinned_copy, "Lane", Lane)
    monkeypatch.setattr(pinned_copy, "loops", lambda: driver.loops)
    made = []

    def of(way):
        made.append(pinned_copy.Road(0, way, 3))
        return made[-1]

    yield of
    for each in made:
        each.stop()


def carried(road, way, x):
    """Where an array was carried to."""
    arrived = np.zeros(x.size + 9, np.uint8)
    road.carry(-(-x.size // PIECE), table([(arrived, x)]))
    assert not arrived[x.size :].any()
    return arrived[: x.size]


@pytest.mark.parametrize("way", ["send", "fetch"])
def test_lanes_do_one_job_after_another(driver, road, way):
    """More at a time than they are told of at once, each from a thread of its own."""
    own = road(way)
    arrays = [np.random.default_rng(n).integers(0, 255, 1 + 37 * n, np.uint8) for n in range(100)]
    with ThreadPoolExecutor(2 * pinned_copy.JOBS) as threads:
        arrived = threads.map(lambda x: carried(own, way, x), arrays)
        for x, found in zip(arrays, arrived, strict=True):
            np.testing.assert_array_equal(found, x)
    assert {*driver.ready} == {5}
    assert len(driver.ready) == sum(min(3, -(-x.size // PIECE)) for x in arrays)


def test_lanes_that_cannot_begin_leave_no_thread_behind(road, monkeypatch):
    def fail():
        if threading.current_thread().name == "multimm-send-2":
            raise RuntimeError("no context")

    monkeypatch.setattr(pinned_copy.Lane.stream, "synchronize", fail)
    with pytest.raises(RuntimeError, match="no context"):
        road("send")
    soon(lambda: not any(x.name.startswith("multimm-send") for x in threading.enumerate()))


@pytest.mark.parametrize("way", ["send", "fetch"])
def test_a_failure_is_raised_for_its_array_alone(driver, road, way):
    own, x = road(way), np.arange(20 * PIECE, dtype=np.uint8)
    driver.fails_after = 4
    with pytest.raises(RuntimeError, match="7"):
        carried(own, way, x)
    driver.fails_after = 10**6
    np.testing.assert_array_equal(carried(own, way, x), x)
    driver.late = 9  # an event that cannot be waited for: nothing is copied
    with pytest.raises(RuntimeError, match="9"):
        carried(own, way, x)


def test_threads_that_want_the_loops_at_once_compile_them_once(monkeypatch):
    compiled = []

    @cache
    def compile_them():
        time.sleep(0.2)
        compiled.append(threading.current_thread().name)
        return object()

    monkeypatch.setattr(loops, "_compiled", compile_them)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: loops.loops(), range(4)))
    assert len(found) == len(compiled) == 1
