"""Progress in Python and on the command line, and what was predicted beside what was measured."""

from __future__ import annotations

import io
import re
import threading
import time

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, in_threads, soon
from dask.callbacks import Callback
from distributed import Client, Event

import multimm
from multimm.cluster.progress import count_tasks, counts_of
from multimm.display.tally import Bar, Count, Tally, said
from multimm.errors import OptionError
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec


class Terminal(io.StringIO):
    def isatty(self):
        return True


def last_line(out):
    return out.getvalue().replace("\r", "\n").splitlines()[-1].strip()


client = counting_client(2)


X = da.ones((40, 40), chunks=10)


def slowly(block):
    time.sleep(0.1)
    return block


@pytest.mark.parametrize("scheduler", ["threads", "sync"])
def test_without_a_cluster(scheduler):
    out = io.StringIO()
    with multimm.progress(out=out) as run:
        c = multimm.matmul(X, X, blocks=10, slabs=10).compute(scheduler=scheduler)
    np.testing.assert_array_equal(c, np.full((40, 40), 40.0))
    assert run.tasks >= 64
    assert re.fullmatch(r"\[#{24}\] 100%  ([\d,]+) of \1 tasks, [\d.]+ m?s", last_line(out))
    assert str(run).startswith(f"{run.tasks} tasks in ")
    # Nothing is watched when it is over.
    X.sum().compute(scheduler=scheduler)
    assert len(out.getvalue().splitlines()) == 1


def test_what_another_thread_computes_goes_on_as_it_ends():
    begun, end, before = threading.Event(), threading.Event(), {*Callback.active}

    def wait(block):
        begun.set()
        assert end.wait(60)
        return block

    other = X[:10, :10].map_blocks(wait, dtype=float, meta=X._meta)
    thread = threading.Thread(target=other.compute, kwargs={"scheduler": "threads"})
    try:
        with multimm.progress(out=io.StringIO()):
            thread.start()
            assert begun.wait(60)
    finally:
        end.set()
        thread.join()
    assert Callback.active == before


def test_on_a_cluster_what_was_persisted_is_waited_for(client):
    out = io.StringIO()
    with multimm.progress(out=out) as run:
        c = multimm.matmul(X, X, blocks=10, slabs=10).persist()
    assert all(future.status == "finished" for future in client.futures_of(c))
    assert run.tasks >= 64
    assert "100%" in last_line(out)
    assert counts_of(client)  # of C, that is kept
    with multimm.progress(out=out) as again:
        total = c.map_blocks(slowly, dtype=float).sum().compute()
    assert total == 64_000
    assert 0 < again.tasks < run.tasks  # what is done does not count


def test_others_tasks_do_not_count(client):
    with Client(client.scheduler.address, set_as_default=False) as other:
        held = other.submit(lambda: Event("multimm-progress").wait(), key="theirs", pure=False)
        soon(lambda: "theirs" in counts_of(other))
        assert counts_of(other)["theirs"].left == 1
        assert client.run_on_scheduler(count_tasks, "nobody") == {}
        with multimm.progress(out=io.StringIO()):  # and does not wait for it
            X.sum().persist()
        assert "theirs" not in counts_of(client)
        assert not held.done()
        Event("multimm-progress", client=client).set()


@pytest.mark.parametrize("on_cluster", [True, False])
def test_what_fails_raises_its_own_error(request, on_cluster):
    def fail(block):
        raise ValueError("no")

    if on_cluster:
        request.getfixturevalue("client")
    out, options = io.StringIO(), {} if on_cluster else {"scheduler": "sync"}
    with pytest.raises(ValueError, match="no"), multimm.progress(out=out) as run:
        X.map_blocks(fail, dtype=float).compute(**options)
    assert re.fullmatch(r"stopped after [\d.]+ [mu]?s", last_line(out))
    assert run.tasks < 32  # 16 make X, and 16 fail


def test_predicted_beside_measured(client):
    a = da.ones((60, 60), chunks=20).persist()
    plan = multimm.plan(a, a, blocks=20, slabs=20)
    with multimm.progress(plan, out=io.StringIO()) as run:
        multimm.matmul(a, a, blocks=20, slabs=20).compute()
    comparison = run.comparison
    assert comparison.predicted == plan.seconds
    assert comparison.measured == run.seconds
    assert comparison.ratio == pytest.approx(run.seconds / plan.seconds)
    assert str(run) == str(comparison)
    assert [line.split()[0] for line in str(run).splitlines()[1:]][:2] == ["time", "rate"]
    assert "<table>" in run._repr_html_()


def test_a_client_that_was_closed_inside():
    with in_threads(1) as cluster, Client(cluster) as own:
        plan = multimm.plan(X, X)
        with multimm.progress(plan, out=io.StringIO()) as run:
            multimm.matmul(X, X).compute()
            own.close()
    assert run.comparison.bytes_measured is None


def test_compare_of_a_plan_on_paper():
    side = MatrixSpec((65536, 65536))
    plan = multimm.plan(side, side, cluster=ClusterSpec.homogeneous(H200, 4))
    text = str(plan.compare(2 * plan.seconds, bytes_moved=plan.bytes_moved)).splitlines()
    assert text[0].split() == ["predicted", "measured", "measured/predicted"]
    assert [line.split()[-1] for line in text[1:]] == ["2.00", "0.50", "1.00"]
    for wrong in (-1, float("nan"), "soon", None):
        with pytest.raises(OptionError, match="seconds="):
            plan.compare(wrong)


def test_what_is_no_plan_is_refused():
    with pytest.raises(OptionError, match="plan=3: give what"):
        multimm.progress(3)


def test_an_asynchronous_client_is_refused():
    import asyncio

    async def enter():
        async with Client(processes=False, asynchronous=True, dashboard_address=":0"):
            with multimm.progress():
                pass

    with pytest.raises(OptionError, match="asynchronous"):
        asyncio.run(enter())


# ------------------------------------------------------------------------------ the line


def test_tasks_count_as_long_as_others_of_their_kind_took():
    tally = Tally()
    tally.update({"multimm-matmul-0": Count(5, 10, 50.0, 1), "read-0": Count(0, 10, 10.0)})
    # Of 10 tasks of 10 s and 10 of 1 s, 5 of 10 s are left.
    assert tally.share == pytest.approx(1 - 50 / 110)
    bar = Bar(tally, io.StringIO())
    assert bar.seconds_left(60.0) == pytest.approx(50.0)
    line = bar.line(60.0)
    assert "15 of 20 tasks, 60 s, about 50 s left  multiplying" in line


def test_a_plan_tells_the_time_before_the_first_task_is_done():
    tally = Tally()
    tally.update({"multimm-matmul-0": Count(10, 10, 0.0, 2)})
    assert Bar(tally, io.StringIO(), predicted=30.0).seconds_left(10.0) == 20.0
    assert Bar(tally, io.StringIO()).seconds_left(10.0) is None


def test_what_was_done_before_does_not_count_and_what_is_forgotten_is_done():
    tally = Tally({"old": Count(0, 7, 70.0), "half": Count(2, 4, 2.0)})
    tally.update({"old": Count(0, 7, 70.0), "half": Count(1, 4, 3.0), "new": Count(3, 3)})
    assert (tally.total, tally.left) == (5, 4)
    tally.update({})
    assert (tally.total, tally.left, tally.share) == (5, 0, 1.0)
    tally = Tally({"old": Count(0, 7, 70.0)})
    tally.update({"old": Count(2, 2)})  # made anew
    assert (tally.total, tally.left) == (2, 2)


def test_a_terminal_has_one_line_and_a_file_a_few():
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        tally = Tally()
        bar = Bar(tally, out, "making A")
        for left in range(100, -1, -1):
            tally.update({"ones-0123456789": Count(left, 100, 100.0 - left, 1)})
            bar.draw(101.0 - left)
        bar.end(101.0)
    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().count("\r") == 102
    assert 2 <= file.getvalue().count("\n") <= 5
    assert "\r" not in file.getvalue()
    assert last_line(file) == last_line(terminal)
    assert last_line(file) == "making A [########################] 100%  100 of 100 tasks, 101 s"


def test_a_stream_that_was_closed_ends_nothing():
    out = Terminal()
    out.close()
    with multimm.progress(out=out):
        X.sum().compute(scheduler="sync")


def test_names_of_others_are_shown_and_not_obeyed():
    assert said("red\x1b[31m-0123456789abcdef") == "red\\x1b[31m"
