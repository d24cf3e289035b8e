"""How far tasks have come, by what they do: the bar, and the time that is left."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from multimm.display.units import duration
from multimm.errors import printable

#: Characters of the bar, and of a line where a terminal does not say: arbitrary.
BAR, COLUMNS = 24, 100
#: Where lines cannot be drawn again: seconds before the first one, and how many there may be.
PATIENCE, LINES = 5.0, 4
#: Kinds of tasks that a line names.
NAMED = 2
#: From this share on, the tasks themselves tell how long they take: arbitrary.
KNOWN = 0.02


class Count(NamedTuple):
    """Tasks of one kind."""

    left: int
    total: int
    seconds: float = 0.0  #: that those which are done took
    running: int = 0


class Tally:
    """Tasks by kind since the first look: what was done before does not count."""

    def __init__(self, before: Mapping[str, Count] | None = None) -> None:
        self._before = dict(before or {})
        self._seen: dict[str, Count] = {}

    def update(self, counts: Mapping[str, Count]) -> None:
        """Take in what there is now; kinds that are gone are done."""
        for name in self._seen.keys() - counts.keys():
            self._seen[name] = self._seen[name]._replace(left=0, running=0)
            self._before.pop(name, None)
        for name, now in counts.items():
            was = self._before.get(name, Count(0, 0))
            done = was.total - was.left
            if now.total < was.total:  # made anew since
                self._before.pop(name)
                was, done = Count(0, 0), 0
            if now.left or now.total > was.total or name in self._seen:
                self._seen[name] = Count(
                    now.left, now.total - done, max(0.0, now.seconds - was.seconds), now.running
                )

    @property
    def total(self) -> int:
        """All tasks."""
        return sum(count.total for count in self._seen.values())

    @property
    def left(self) -> int:
        """Those that are not done."""
        return sum(count.left for count in self._seen.values())

    @property
    def share(self) -> float:
        """Of all work, what is done: a task counts as long as others of its kind took."""
        counts = [*self._seen.values()]
        done = sum(count.total - count.left for count in counts)
        if not self.left or not done:
            return float(bool(done))
        usual = sum(count.seconds for count in counts) / done or 1.0

        def each(count: Count) -> float:
            ready = count.total - count.left
            return count.seconds / ready if ready and count.seconds else usual

        work = sum(count.total * each(count) for count in counts)
        return 1 - sum(count.left * each(count) for count in counts) / work

    @property
    def doing(self) -> str:
        """What runs, most of it first."""
        kinds: dict[str, int] = {}
        for name, count in self._seen.items():
            if count.left and count.running:
                kinds[said(name)] = kinds.get(said(name), 0) + count.running
        return ", ".join(sorted(kinds, key=kinds.__getitem__, reverse=True)[:NAMED])


#: What tasks of multimm do, by what their names begin with.
_DOES = (
    ("multimm-packed", "packing"),
    (("multimm-cut", "multimm-joined", "multimm-coalesced"), "rechunking"),
    ("multimm-uploaded", "copying to GPUs"),
    ("multimm-downloaded", "multiplying, copying back"),
    ("multimm-sum", "adding"),
    ("multimm-chunk", "cutting C into chunks"),
    ("multimm-", "multiplying"),
    ("read-", "reading"),
    ("write-", "writing"),
)


def said(name: str) -> str:
    """What tasks do, in a word; of others' tasks their name without what makes it unique.

    >>> said("multimm-matmul-0a1b"), said("ones-0123456789abcdef"), said("ones-like")
    ('multiplying', 'ones', 'ones-like')
    """
    for begins, does in _DOES:
        if name.startswith(begins):
            return does
    head, _, last = name.rpartition("-")
    unique = len(last) >= 8 and all(one in "0123456789abcdef" for one in last)
    return printable(head if head and unique else name)[:30]


class Bar:
    """A line that is drawn again where it can be, and a few lines where it can't.

    Parameters
    ----------
    tally : Tally
    out : stream
    label : str
        What stands before the bar.
    predicted : float, optional
        Seconds, for as long as nothing better is known.
    """

    def __init__(
        self,
        tally: Tally,
        out: Any,
        label: str = "",
        predicted: float = 0.0,
    ) -> None:
        self.tally, self._out, self._label, self._predicted = tally, out, label, predicted
        notebook = type(out).__module__.startswith("ipykernel")
        self.redraws = notebook or bool(getattr(out, "isatty", lambda: False)())
        self._width = self._lines = 0

    def draw(self, elapsed: float) -> None:
        """Show how far tasks are after so many seconds."""
        if self.redraws:
            self._write(f"\r{self._fitted(self.line(elapsed))}")
        elif elapsed >= PATIENCE and self.tally.share >= (self._lines + 1) / LINES:
            self._lines = int(self.tally.share * LINES)
            self._write(f"{self.line(elapsed)}\n")

    def end(self, elapsed: float, *, stopped: bool = False) -> None:
        """Show the last line; `stopped`: by an error."""
        line = self._stopped(elapsed) if stopped else self.line(elapsed, over=True)
        self._write(f"\r{self._fitted(line)}\n" if self.redraws else f"{line}\n")

    def line(self, elapsed: float, *, over: bool = False) -> str:
        """The line after so many seconds; at last, without what is to come."""
        share, tally = self.tally.share, self.tally
        full = "#" * int(BAR * share)
        head = f"{self._label} " if self._label else ""
        bar = f"{head}[{full:<{BAR}}] {int(100 * share):3d}%"
        tasks = f"{tally.total - tally.left:,} of {tally.total:,} tasks"
        if over and not tally.total:  # so soon that nobody saw them
            return f"{head}[{'#' * BAR}] done, {duration(elapsed)}"
        if over:
            return f"{bar}  {tasks}, {duration(elapsed)}"
        left = self.seconds_left(elapsed)
        after = f", about {_whole(max(1.0, left))} left" if left is not None else ""
        doing = f"  {tally.doing}" if tally.doing else ""
        return f"{bar}  {tasks}, {_whole(elapsed)}{after}{doing}"

    def _stopped(self, elapsed: float) -> str:
        return f"{f'{self._label} ' if self._label else ''}stopped after {duration(elapsed)}"

    def seconds_left(self, elapsed: float) -> float | None:
        """As long as the rest takes if it is as fast as what is done; None: nobody knows."""
        share = self.tally.share
        if share >= KNOWN or not self._predicted:
            left = elapsed * (1 / share - 1) if share > 0 else None
        else:
            left = max(0.0, self._predicted - elapsed)
        return left

    def _fitted(self, line: str) -> str:
        """As long as the terminal is wide, at most, over all of the line before."""
        width = shutil.get_terminal_size((COLUMNS, 0)).columns - 1
        line = line[:width]
        before, self._width = self._width, len(line)
        return line + " " * min(width - len(line), max(0, before - len(line)))

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a stream that was closed
            self._out.write(text)
            self._out.flush()


def _whole(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else duration(seconds)


def stdout() -> Any:
    """Where bars go by default; a process without a terminal may have none."""
    import io

    return sys.stdout if sys.stdout is not None else io.StringIO()
