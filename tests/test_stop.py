"""Ctrl-C, SIGTERM and SIGHUP: never lost, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import time

import click
import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from clusters import in_threads
from commands import command
from distributed import Client
from foreign_files import names

from multimm.cli import Commands, stop
from multimm.cli import run as cli_run
from multimm.cli.run import failed_run
from multimm.cli.stop import STOP, Stopped

CODES = {signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def _signals_that_nobody_ignores():
    """Under nohup pytest, and what it starts, would ignore SIGHUP; in the background, Ctrl-C."""
    own = dict.fromkeys(CODES, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) is own[number]
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code", "text", "form"),
    [
        (signal.SIGINT, 130, "interrupted", "zarr"),
        pytest.param(signal.SIGTERM, 143, "stopped by SIGTERM", "npy", marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_mid_run_leaves_nothing(tmp_path, number, code, text, form):
    size = 8000
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", "float32", (size, size))
    process = command(
        *("matmul", tmp_path / "a.npy", tmp_path / "a.npy", "-o", tmp_path / f"c.{form}"),
        *("--workers", 2, "--memory-limit", "1GB"),
    )
    deadline = time.monotonic() + 60
    while len(names(tmp_path)) < 2:  # until the unfinished output is there
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # into the run; 10**12 operations take much longer
    # A terminal, `timeout` and batch systems send it to the workers as well.
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors.strip() == f"multimm: {text}"
    assert names(tmp_path) == ["a.npy"]


def test_ctrl_c_is_not_lost_in_a_callback_of_the_garbage_collector():
    def interrupted(phase, info):
        if not sent:
            sent.append(phase)
            signal.raise_signal(signal.SIGINT)  # handled before the callback returns

    sent = []
    gc.callbacks.append(interrupted)
    try:
        with STOP.heeded(), pytest.raises(Stopped), STOP.held_back():  # noqa: PT012
            STOP.check()
            gc.collect()
            with pytest.raises(Stopped):
                STOP.check()
    finally:
        gc.callbacks.remove(interrupted)
    assert sent


def held_back(*numbers):
    """Which of the signals are raised at once where they are held back."""
    at_once = []
    with STOP.heeded(), pytest.raises(Stopped), STOP.held_back():  # noqa: PT012
        for number in numbers:
            try:
                signal.raise_signal(number)
            except Stopped:
                at_once.append(number)
    return at_once


def test_a_second_ctrl_c_is_not_waited_for():
    others = signal.SIGTERM, signal.SIGHUP  # the same request
    assert held_back(signal.SIGINT, signal.SIGINT, *others) == [signal.SIGINT]
    assert held_back(signal.SIGTERM, signal.SIGINT, *others) == [signal.SIGINT]
    assert held_back(signal.SIGHUP, *others) == []


def test_a_run_is_interrupted_where_it_looks_for_signals(monkeypatch):
    def finished(futures):
        if not went_on:
            signal.raise_signal(signal.SIGINT)
        went_on.append(True)
        return len(went_on) > 1

    went_on = []
    monkeypatch.setattr(cli_run, "_finished", finished)
    with (
        in_threads(1) as cluster,
        Client(cluster.scheduler_address) as client,
        STOP.heeded(),
        pytest.raises(Stopped),
    ):
        cli_run.compute(client, da.ones(3), "waiting")
    assert went_on == [True]


def exit_of(command):
    """Exit code and text of a command line with this one command."""
    group = Commands("multimm")
    group.get_command = lambda ctx, name: click.Command(name, callback=command)
    result = CliRunner().invoke(group, ["command"])
    return result.exit_code, result.stderr.strip()


@pytest.mark.parametrize("number", CODES)
def test_a_signal_ends_a_command_as_an_error_does(number):
    cleaned = []

    def run():
        try:
            signal.raise_signal(number)
            time.sleep(60)
        finally:
            signal.raise_signal(number)  # the same request: it disturbs no cleaning up
            cleaned.append(number)

    assert exit_of(run) == (CODES[number], f"multimm: stopped by {number.name}")
    assert cleaned == [number]
    assert STOP.signal is None


def test_ctrl_c_ends_a_command_and_its_cleaning_up():
    cleaned = []

    def run():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            cleaned.append(True)

    assert exit_of(run) == (130, "multimm: interrupted")
    assert not cleaned
    assert STOP.signal is None


def test_a_later_signal_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(stop, "SAME_SECONDS", 0)
    assert held_back(signal.SIGTERM, signal.SIGHUP) == [signal.SIGHUP]


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_that_is_held_back_is_raised_at_the_end(number):
    assert held_back(number) == []
    with STOP.heeded():
        with pytest.raises(Stopped), STOP.held_back():
            signal.raise_signal(number)
        assert STOP.signal is number


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM")],
)
def test_a_run_that_dies_of_the_signal_counts_as_stopped(number, code, text):
    def run():
        with failed_run(client), STOP.held_back():
            signal.raise_signal(number)
            raise OSError("the workers got it too")

    with in_threads(1) as cluster, Client(cluster.scheduler_address) as client:
        assert exit_of(run) == (code, f"multimm: {text}")


def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert exit_of(lambda: signal.raise_signal(signal.SIGHUP)) == (0, "")
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
