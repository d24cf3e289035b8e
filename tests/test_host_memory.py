"""NumPy blocks that are read where they lie: as they were, by whom, and what failures do."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import msgpack
import numpy as np
import pytest
from clusters import asked_families
from distributed.protocol.serialize import families as known_families

from multimm.cluster.plugins import families, host_memory
from multimm.cluster.plugins.host_memory import HostMemory

pytestmark = pytest.mark.skipif(
    host_memory._library() is None, reason="this system reads no other process"
)

HERE = {"sender": {"address": "tcp://10.0.0.1:1"}, "recipient": {"address": "tcp://10.0.0.1:2"}}
ELSEWHERE = {**HERE, "recipient": {"address": "tcp://10.0.0.2:2"}}
EDGE = 300


@pytest.fixture(autouse=True)
def own_families():
    with asked_families():
        yield
        host_memory._met.clear()


def travelled(x):
    """What a receiver has of it, which is this process, too."""
    header, frames = host_memory.say_where(x, HERE)
    assert frames == []
    return host_memory.read(msgpack.loads(msgpack.dumps(header), use_list=False), frames)


# ------------------------------------------------------------------------ the two ends


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "?", "i1", ml_dtypes.bfloat16])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x.reshape(3, 100, EDGE)])
def test_a_block_arrives_as_it_was(view, dtype):
    block = view((np.arange(EDGE * EDGE) % 2).reshape(EDGE, EDGE).astype(dtype))
    found = travelled(block)
    assert (found.dtype, found.shape, found.strides) == (block.dtype, block.shape, block.strides)
    assert found.flags.writeable
    assert not np.shares_memory(found, block)
    np.testing.assert_array_equal(found, block)


def test_a_block_that_may_not_be_written_may_not_be_written():
    block = np.ones((EDGE, EDGE))
    block.flags.writeable = False
    assert not travelled(block).flags.writeable


@pytest.mark.parametrize("long", [0, 2**40])
def test_a_block_of_several_parts_arrives(monkeypatch, long):
    monkeypatch.setattr(host_memory, "PART_BYTES", 100_001)
    monkeypatch.setattr(host_memory, "LONG_BYTES", long)
    block = np.random.default_rng(1).random((EDGE, EDGE))
    np.testing.assert_array_equal(travelled(block), block)


class Own(np.ndarray):
    """A kind of array that Dask serializes in its own way."""


@pytest.mark.parametrize(
    ("block", "context"),
    [
        (np.ones(10), HERE),  # small
        ("text" * 100_000, HERE),
        (np.full((EDGE, EDGE), "text", object), HERE),
        (np.ones((EDGE, EDGE))[:, ::2], HERE),
        (np.broadcast_to(np.ones(EDGE), (EDGE, EDGE)), HERE),
        (np.ones((EDGE, EDGE)).view(Own), HERE),
        (np.ones(EDGE * EDGE, np.dtype("f8", metadata={"of a user": lambda: 0})), HERE),
        (np.ones((EDGE, EDGE)), ELSEWHERE),
        (np.ones((EDGE, EDGE)), None),
    ],
)
def test_all_else_is_sent_as_before(block, context):
    with pytest.raises(NotImplementedError):
        host_memory.say_where(block, context)


# ---------------------------------------------------------------------------- failures


class Connections:
    """Stands for a worker's."""


@pytest.fixture
def asks():
    """Connections that ask so."""
    rpc = Connections()
    families.ask(rpc, host_memory.NAME)
    return rpc


def header_of(**changes):
    header, _ = host_memory.say_where(np.ones((EDGE, EDGE)), HERE)
    return {**header, **changes}


def ended():
    """A process that has been read before."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        process = host_memory._process()._replace(pid=child.pid)
    host_memory._met.add(process)
    return process


def test_a_lost_peer_is_lost_and_others_are_read_as_before(asks, caplog):
    with pytest.raises(OSError, match="No such process"):
        host_memory.read(header_of(process=tuple(ended())), [])
    assert host_memory.NAME in families.asked(asks)
    assert caplog.text == ""


def test_another_process_with_the_number_of_a_lost_one_is_not_read(asks):
    mine = host_memory._process()
    other = mine._replace(mark=bytes(16))
    host_memory._met.add(other)
    with pytest.raises(OSError, match="was not read"):
        host_memory.read(header_of(process=tuple(other)), [])
    assert host_memory.NAME in families.asked(asks)


def test_a_process_that_is_forked_is_another_one():
    sent, came = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.write(came[1], host_memory._process().mark)
        os.read(sent[0], 1)
        os._exit(0)
    try:
        mark = os.read(came[0], 16)
        mine = host_memory._process()
        assert mark != mine.mark
        assert not host_memory._answers(mine._replace(pid=pid))
        assert host_memory._answers(mine._replace(pid=pid, mark=mark))
    finally:
        os.write(sent[1], b".")
        os.waitpid(pid, 0)


@pytest.mark.parametrize("address", [0, 8])
def test_a_block_that_cannot_be_read_is_asked_for_as_before(asks, address):
    """Of a peer that can: nobody asks for blocks so again, as the next might be another such.

    If somebody waits for it: else its owner may have dropped it.
    """
    assert host_memory._can_read(host_memory._process())
    with pytest.raises(families.NeverReadError, match=r"from now on: .*process \d+ was not read"):
        host_memory.read(header_of(address=address), [])
    assert host_memory.NAME in families.asked(asks)  # whoever fetches it decides


def test_a_peer_that_may_be_read_no_more_is_asked_as_before(monkeypatch):
    """It is not lost: who waited for it to come back would wait for ever."""
    assert host_memory._can_read(host_memory._process())

    class Library:
        @staticmethod
        def process_vm_readv(*args):
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(host_memory, "_library", lambda: Library)
    with pytest.raises(families.NeverReadError, match="not permitted"):
        host_memory.read(header_of(), [])


def test_a_peer_that_was_never_read_is_asked_as_before():
    stranger = host_memory._process()._replace(mark=bytes(16))
    with pytest.raises(families.NeverReadError, match="was not read"):
        host_memory.read(header_of(process=tuple(stranger)), [])


def test_a_block_that_its_owner_may_have_dropped_meanwhile_is_not_taken(asks, monkeypatch):
    """A worker is closed while its block is copied."""
    header, plugin = header_of(), HostMemory()
    assert host_memory._can_read(host_memory._process())

    class Library:
        @staticmethod
        def process_vm_readv(pid, mine, _, theirs, *more):
            for one, other in zip(mine, theirs, strict=True):
                ctypes.memmove(one.address, other.address, one.nbytes)
                plugin.teardown(a_worker(None))
            return sum(part.nbytes for part in mine)

    monkeypatch.setattr(host_memory, "_library", lambda: Library)
    with pytest.raises(OSError, match="was not read"):
        host_memory.read(header, [])
    assert host_memory.NAME in families.asked(asks)


# -------------------------------------------------------------------------- who asks


def a_worker(told, address="tcp://10.0.0.1:1"):
    class Peer:
        def __call__(self, address):
            return self

        async def run(self, function):
            return {"status": "OK", "result": told}

    return SimpleNamespace(address=address, rpc=Peer())


@pytest.mark.parametrize("readable", [True, False])
def test_a_worker_asks_so_once_it_could_read_its_peers(readable):
    told = host_memory._process() if readable else None
    worker, plugin = a_worker(told), HostMemory()
    plugin.setup(worker)
    asyncio.run(plugin.meet(worker, "tcp://10.0.0.1:2"))
    assert families.asked(worker.rpc) is None
    plugin.begin(worker)
    assert plugin.direct == readable
    assert (families.asked(worker.rpc) is not None) == readable


def test_a_peer_of_another_host_need_not_be_read():
    worker, plugin = a_worker(None), HostMemory()
    asyncio.run(plugin.meet(worker, "tcp://10.0.0.2:2"))
    plugin.begin(worker)
    assert plugin.direct


@pytest.mark.parametrize("address", ["ucxx://10.0.0.1:1", "inproc://10.0.0.1/1/2"])
def test_other_transports_are_left_alone(address):
    worker, plugin = a_worker(None, address), HostMemory()
    plugin.setup(worker)
    plugin.begin(worker)
    assert not plugin.direct
    assert families.asked(worker.rpc) is None
    assert host_memory.NAME in known_families  # peers that do may be asking it
