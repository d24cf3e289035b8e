"""Who is inside of `accelerate()`: threads, tasks, decorated functions, and others' patches."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import pickle
import threading

import cloudpickle
import dask.array as da
import numpy as np
import pytest
import tornado.gen
from accelerating import ours, untouched
from commands import python
from dask.array import routines

import multimm
from multimm import dispatch, entries
from multimm.errors import OptionError


@pytest.fixture(autouse=True)
def dask_is_itself_before_and_after():
    assert untouched()
    yield
    assert untouched()
    assert dispatch.PATCH.users == 0


@pytest.fixture
def x():
    return da.from_array(np.arange(20.0).reshape(5, 4), chunks=2)


def test_dask_is_restored_after_an_exception(x):
    with pytest.raises(ZeroDivisionError), multimm.accelerate(), multimm.accelerate():
        raise ZeroDivisionError
    assert untouched()
    assert not ours(x @ x.T)


def test_never_recurses(x, monkeypatch):
    """multimm's own code, and what it calls, gets Dask's functions."""
    seen = []

    def matmul(a, b, **options):
        seen.append(dispatch.accelerated() is not None)
        return routines.matmul(a, da.matmul(b, np.eye(b.shape[1])))

    monkeypatch.setattr(entries, "matmul", matmul)
    with multimm.accelerate():
        result = x @ x.T
        assert dispatch.accelerated()
    assert seen == [False]
    np.testing.assert_array_equal(result.compute(), (x @ x.T).compute())


def test_other_threads_are_untouched_while_the_wrappers_are_in_place(x):
    found = {}

    def other():
        found["wrapped"] = not untouched()
        found["ours"] = ours(x @ x.T)

    with multimm.accelerate():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert ours(x @ x.T)
    assert found == {"wrapped": True, "ours": False}


def test_a_task_that_outlives_its_session_is_plain_again(x):
    found = {}

    async def late(go):
        found["during"] = ours(x @ x.T)
        await go.wait()
        found["after"] = ours(x @ x.T)

    async def main():
        go = asyncio.Event()
        with multimm.accelerate():
            task = asyncio.ensure_future(late(go))
            await asyncio.sleep(0)
        # Another session keeps the wrappers in place; it is not the task's.
        with multimm.accelerate():
            go.set()
            await task

    asyncio.run(main())
    assert found == {"during": True, "after": False}


def test_a_generator_closed_elsewhere_leaves_dask_as_it_was(x):
    def generate():
        with multimm.accelerate():
            yield x @ x.T

    generator = generate()
    assert ours(contextvars.copy_context().run(next, generator))
    generator.close()
    assert untouched()
    assert not ours(x @ x.T)


def test_a_later_patch_by_somebody_else_survives(x):
    original = da.matmul

    def theirs(a, b):
        return original(a, b)

    try:
        with multimm.accelerate():
            da.matmul = theirs
        assert da.matmul is theirs
    finally:
        da.matmul = original


@pytest.mark.parametrize("named", ["theirs", "<lambda>", "einsum"])
def test_an_earlier_patch_by_somebody_else_is_what_dask_has(x, monkeypatch, named):
    original, calls = da.matmul, []

    def theirs(a, b):
        calls.append(named)
        return original(a, b)

    theirs.__name__ = named
    monkeypatch.setattr(da, "matmul", theirs)
    with multimm.accelerate() as report:
        y = da.matmul(x, x.T)
        left = da.matmul(x > 0, x.T > 0)
    assert ours(y)
    assert not ours(left)
    assert calls == [named]
    assert [call.function for call in report.taken] == ["matmul"]
    assert da.matmul is theirs


def test_sessions_that_end_in_any_order(x):
    """As those of two generators that run in turns do."""
    first, second = multimm.accelerate(), multimm.accelerate()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert ours(x @ x.T)
    second.__exit__(None, None, None)
    assert not ours(x @ x.T)
    assert untouched()


@pytest.mark.parametrize("second_leaves_first", [False, True])
def test_one_session_object_in_two_threads_ends_each_where_it_began(x, second_leaves_first):
    one, found = multimm.accelerate(), {}
    turns = [threading.Event() for _ in range(4)]  # entered, entered, left, left

    def enter(n, last):
        if n:
            assert turns[0].wait(10)
        with one:
            turns[n].set()
            assert turns[2 if last else 1].wait(10)
            found[n, "inside"] = ours(x @ x.T)
        found[n, "behind"] = ours(x @ x.T)
        turns[3 if last else 2].set()

    threads = [threading.Thread(target=enter, args=(n, n != second_leaves_first)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {
        (n, where): where == "inside" for n in (0, 1) for where in ("inside", "behind")
    }


def test_a_task_that_a_decorated_function_returns_is_inside_until_it_is_done(x):
    async def later():
        await asyncio.sleep(0)
        return ours(x @ x.T)

    @tornado.gen.coroutine
    def in_steps():
        yield tornado.gen.sleep(0)
        return ours(x @ x.T)

    async def main():
        tasks = [
            multimm.accelerate()(func)()
            for func in (lambda: asyncio.create_task(later()), in_steps)
        ]
        without = ours(x @ x.T)
        return [await task for task in tasks], without, ours(x @ x.T)

    assert asyncio.run(main()) == ([True, True], False, False)


def test_functions_that_are_kept_do_what_dask_does_and_travel_to_other_processes(x):
    with multimm.accelerate():
        assert pickle.loads(pickle.dumps(da.matmul)) is da.matmul
        kept = da.matmul
    assert kept is not da.matmul
    assert not ours(kept(x, x.T))
    with multimm.accelerate():
        assert ours(kept(x, x.T))
    copy = cloudpickle.loads(cloudpickle.dumps(kept))
    np.testing.assert_array_equal(copy(x, x.T).compute(), (x @ x.T).compute())


FORKED = """
import os, signal, threading
import multimm
with multimm.accelerate():
    pass  # imports, for which Python has a lock of its own
over = threading.Event()
def enter_and_leave():
    while not over.is_set():
        with multimm.accelerate():
            pass
other = threading.Thread(target=enter_and_leave)
other.start()
codes = set()
for _ in range(40):
    if not (child := os.fork()):
        signal.alarm(20)
        with multimm.accelerate():
            os._exit(0)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if codes != {0}:
        break
over.set()
other.join()
print(codes)
"""


def test_a_fork_enters_while_another_thread_of_its_parent_did():
    found = python("-c", FORKED)
    assert found.stdout == "{0}\n", found.stderr


def test_a_decorated_function_travels_to_other_processes(x):
    def taken():
        y = da.ones((4, 4), chunks=2)
        return any(name.startswith("multimm") for name in (y @ y).dask.layers)

    assert cloudpickle.loads(cloudpickle.dumps(multimm.accelerate()(taken)))()


def test_as_a_decorator_of_a_coroutine_function(x):
    async def child():
        await asyncio.sleep(0)
        return ours(x @ x.T)

    @multimm.accelerate()
    async def coroutine(fails=False):
        found = [ours(x @ x.T)]
        await asyncio.sleep(0)
        found += [ours(x @ x.T), *await asyncio.gather(child(), child())]
        if fails:
            raise KeyError("of the user")
        return found

    async def main():
        task = asyncio.create_task(coroutine())
        seen = []
        while not task.done():
            seen.append(ours(x @ x.T))
            await asyncio.sleep(0)
        with pytest.raises(KeyError):
            await coroutine(fails=True)
        return await task, await coroutine(), [*seen, ours(x @ x.T)]

    first, second, seen = asyncio.run(main())
    assert first == second == [True] * 4
    assert len(seen) > 2
    assert not any(seen)
    assert asyncio.iscoroutinefunction(coroutine)


def test_as_a_decorator_of_methods_and_partial_functions(x):
    class Model:
        @multimm.accelerate()
        @classmethod
        def above(cls):
            return cls, ours(x @ x.T)

        @classmethod
        @multimm.accelerate()
        def below(cls):
            return cls, ours(x @ x.T)

        @multimm.accelerate()
        @staticmethod
        def static():
            return ours(x @ x.T)

        @multimm.accelerate()
        def method(self):
            """What it says."""
            return type(self), ours(x @ x.T)

        @multimm.accelerate()
        def __call__(self):
            return ours(x @ x.T)

    assert Model.above() == Model().above() == Model.below() == Model().method() == (Model, True)
    assert Model.static()
    assert Model()()
    assert Model.method.__doc__ == "What it says."
    assert multimm.accelerate()(functools.partial(lambda y: ours(y @ y.T), x))()
    assert multimm.accelerate()(Model())()


def steps():
    yield


async def steps_to_await():
    yield


class Steps:
    def __call__(self):
        yield


class StepsToAwait:
    async def __call__(self):
        yield


NO_FUNCTIONS = [
    dict,
    property(lambda self: None),
    7,
    steps,
    steps_to_await,
    Steps(),
    StepsToAwait(),
]


@pytest.mark.parametrize("thing", NO_FUNCTIONS)
def test_what_is_no_function_or_a_generator_is_no_place_for_the_decorator(thing):
    with pytest.raises(OptionError, match=r"multimm\.accelerate\(\) decorates functions") as info:
        multimm.accelerate()(thing)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("make", [steps, steps_to_await])
def test_a_generator_that_is_returned_is_refused(make):
    with pytest.raises(OptionError, match=r"multimm\.accelerate\(\) decorates functions"):
        multimm.accelerate()(lambda: make())()


def test_what_gives_a_coroutine_is_inside_while_it_runs(x):
    class Model:
        async def __call__(self):
            await asyncio.sleep(0)
            return ours(x @ x.T)

    for func in Model(), lambda: Model()(), functools.partial(Model().__call__):
        assert asyncio.run(multimm.accelerate()(func)())
    assert not ours(x @ x.T)
