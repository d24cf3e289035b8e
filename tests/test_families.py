"""Ways of sending blocks that are not Dask's: who asks for them, and gets them."""

from __future__ import annotations

import asyncio
import functools
import importlib
import threading
import time

import numpy as np
import pytest
from clusters import asked_families, in_threads
from distributed import Client, wait

from multimm.cluster.plugins import families


@pytest.fixture(autouse=True)
def dask():
    with asked_families():
        yield


def double(x):
    return 2 * x


def send_values(x, context=None):
    if not isinstance(x, np.ndarray) or not families.same_host(context):
        raise NotImplementedError
    return {"values": x.tolist()}, []


def test_blocks_come_so_to_those_that_ask_alone():
    read = []

    def copied(header, frames):
        read.append(list(header["values"]))
        return np.array(header["values"])

    def one_more():
        families.answer("by values", send_values, copied)

    with in_threads(2, protocol="tcp", memory_limit=0) as cluster, Client(cluster) as client:
        one, two = cluster.workers.values()
        one_more()
        one_more()  # changes nothing
        families.ask(two.rpc, "by values")
        for asks, other in ((two, one), (one, two)):
            block = client.submit(np.arange, 3.0, workers=[other.address], pure=False)
            wait(block)
            found = client.submit(double, block, workers=[asks.address]).result()
            np.testing.assert_array_equal(found, [0, 2, 4])
        assert read == [[0, 1, 2]]


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_that_is_filled_behind_its_message_is_whole_when_a_task_has_it(fails):
    """And if that fails, it is asked for again."""
    tries, kept = [], []

    def come_later(header, frames):
        x = np.zeros(3)

        def fill():
            tries.append(threading.current_thread().name)
            time.sleep(0.1)
            kept.append(one.transfer_outgoing_count == 1)  # by its owner
            if fails and len(tries) == 1:
                raise OSError("no such luck")
            x[...] = header["values"]

        families.behind(fill)
        return x

    with in_threads(2, protocol="tcp", memory_limit=0) as cluster, Client(cluster) as client:
        one, two = cluster.workers.values()
        families.answer("by values", send_values, come_later)
        families.ask(two.rpc, "by values")
        for _ in range(2):  # the connection serves once more
            block = client.submit(np.arange, 3.0, workers=[one.address], pure=False)
            found = client.submit(double, block, workers=[two.address], pure=False).result(30)
            np.testing.assert_array_equal(found, [0, 2, 4])
        assert len(tries) == (3 if fails else 2)
        assert all(kept)
        assert not any(name.startswith(("IO", "MainThread")) for name in tries)


@pytest.fixture
def fetch():
    """Has a worker fetch a block with a given `read`, or be cancelled once `give_up` is set."""
    with in_threads(2, protocol="tcp", memory_limit=0) as cluster, Client(cluster) as client:
        one, two = cluster.workers.values()
        block = client.submit(np.arange, 3.0, workers=[one.address])
        wait(block)

        async def fetched(give_up=None):
            module = importlib.import_module("distributed.worker")
            found = module.get_data_from_worker(two.rpc, [block.key], one.address)
            task = asyncio.ensure_future(found)
            if give_up is not None:
                while not give_up.is_set():
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.wait([task])
                return task.cancelled()
            return (await asyncio.wait_for(task, 30))["data"][block.key].tolist()

        def fetch(read, give_up=None):
            families.answer("by values", send_values, read)
            families.ask(two.rpc, "by values")
            return client.sync(fetched, give_up)

        fetch.asks = lambda: "by values" in families.asked(two.rpc)
        fetch.loop = two.loop.asyncio_loop
        yield fetch


def behind(fill):
    """What reads a block that is filled behind its message."""

    def read(header, frames):
        x = np.zeros(3)
        families.behind(functools.partial(fill, x, header["values"]))
        return x

    return read


def filled(x, values):
    x[...] = values


@pytest.mark.parametrize("later", [True, False])
def test_a_peer_that_cannot_be_read_is_asked_as_dask_would(fetch, later, caplog):
    def fail(*args):
        raise families.NeverReadError("by values", "it is forbidden")

    with pytest.raises(OSError, match="forbidden"):
        fetch(behind(fail) if later else fail)
    assert not fetch.asks()
    assert "it is forbidden" in caplog.text


def test_a_copy_that_fails_when_nobody_waits_for_it_says_nothing_of_the_peer(fetch):
    """The owner may have dropped the block."""
    begun, given_up, over = (threading.Event() for _ in range(3))

    def fail(*args):
        begun.set()
        given_up.wait(30)
        over.set()
        raise families.NeverReadError("by values", "it is no more")

    assert fetch(behind(fail), give_up=begun)
    given_up.set()
    assert over.wait(30)
    assert fetch(behind(filled)) == [0, 1, 2]
    assert fetch.asks()


def test_threads_of_the_event_loop_that_are_busy_are_not_waited_for(fetch):
    """Tasks that fill them may wait for that block."""
    over = threading.Event()
    try:
        for _ in range(40):  # it has 32 at most
            fetch.loop.call_soon_threadsafe(fetch.loop.run_in_executor, None, over.wait)
        assert fetch(behind(filled)) == [0, 1, 2]
    finally:
        over.set()


def test_a_block_that_cannot_be_made_is_no_obstacle_for_others(fetch):
    """The owner waits for an answer on that connection, and takes the next question for one."""

    def fail(*args):
        raise ValueError("this kind is unknown here")

    with pytest.raises(ValueError, match="unknown here"):
        fetch(fail)
    assert fetch(behind(filled)) == [0, 1, 2]


def test_in_a_call_of_ones_own_a_block_is_filled_at_once():
    filled = []
    families.behind(lambda: filled.append(1))
    assert filled == [1]


class Connections:
    """Stands for a worker's."""


def test_what_is_asked_for_last_is_asked_for_first_and_dasks_own_ways_last():
    one, other = Connections(), Connections()
    assert families.asked(one) is None
    families.ask(one, "a")
    families.ask(one, "b")
    families.ask(one, "b")
    families.ask(other, "a")
    assert families.asked(one) == ("b", "a", "dask", "pickle", "error")
    families.stop_asking("a")
    assert families.asked(one) == ("b", "dask", "pickle", "error")
    assert families.asked(other) == ("dask", "pickle", "error")


@pytest.mark.parametrize(
    ("options", "direct"),
    [
        ({}, True),
        ({"direct_to_workers": False}, False),
        ({"deserializers": ["dask", "pickle", "error"]}, None),  # it would refuse other answers
    ],
)
def test_a_client_asks_so_unless_it_was_told_how_to_ask(options, direct):
    with (
        in_threads(1, protocol="tcp", memory_limit=0) as cluster,
        Client(cluster, **options) as client,
    ):
        families.ask_as_client(client, "by values")
        assert client.direct_to_workers is direct
        assert (families.asked(client.rpc) is not None) == bool(direct)


@pytest.mark.parametrize(
    ("context", "same"),
    [
        (None, False),  # a transport that does not say who asks
        ({"sender": {"address": "tcp://a:1"}, "recipient": {"address": "tcp://a:2"}}, True),
        ({"sender": {"address": "tls://a:1"}, "recipient": {"address": "tls://b:1"}}, False),
    ],
)
def test_a_host_is_told_by_its_address(context, same):
    assert families.same_host(context) == same
