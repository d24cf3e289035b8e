"""Ctrl-C, SIGTERM and SIGHUP: a command that is told to end cleans up first."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: `timeout`, batch systems and service managers send the second, a closed terminal the third.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: What follows sooner is the same request, and disturbs no cleaning up: `timeout` tells the
#: process and then its group. Arbitrary: longer than workers take to end. But who presses Ctrl-C
#: again does not want to wait.
SAME_SECONDS = 5.0


class Stopped(KeyboardInterrupt):
    """The command was told to end."""


class Stop:
    """The request to end, which is raised at once or, where that could be lost, by `check`.

    Python raises in whatever the main thread is doing. That may be a callback of the garbage
    collector, of which distributed has one: there an exception is printed, and lost.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._since = 0.0
        self._held = False

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Raise `Stopped` inside when a signal comes; from then on `signal` says which."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Who ignores a signal, as nohup does, has the command ignore it too.
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        before = {n: kept for n, kept in handlers.items() if kept not in (signal.SIG_IGN, None)}
        for number in before:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.signal = None

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """A first signal is raised by `check` alone, and by the end, whatever else it ends with."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self.check()

    def check(self) -> None:
        """Raise `Stopped` if the command was told to end."""
        if self.signal is not None:
            raise Stopped

    def _note(self, number: int, _: FrameType | None) -> None:
        again, now = self.signal is not None, time.monotonic()
        if again and number != signal.SIGINT and now - self._since < SAME_SECONDS:
            return
        self.signal, self._since = signal.Signals(number), now
        if again or not self._held:
            raise Stopped


#: One for the process, as its signals are.
STOP = Stop()
