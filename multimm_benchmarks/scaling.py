"""Scaling over workers, beside the peers: python -m multimm bench

Every system is measured in a process group of its own, one after the other on the same machine.
What is finished is kept in a file next to the results, so that an interrupted sweep goes on where
it was when the same command is given again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from multimm.cluster.inspect.devices import visible_gpus
from multimm.cluster.options import cores
from multimm_benchmarks import records
from multimm_benchmarks.agenda import Asked, Item, agenda, check_disk, groups, kept_seconds, key_of
from multimm_benchmarks.group import Group, GroupError, Message, OutOfTimeError
from multimm_benchmarks.harness import WrongResultError
from multimm_benchmarks.limit import BROKEN_OFF, NOT_BEGUN, QUICK_SECONDS, Limit
from multimm_benchmarks.machine import described
from multimm_benchmarks.peers.__main__ import Work, job
from multimm_benchmarks.records import Record
from multimm_benchmarks.report.runs import SCALING
from multimm_benchmarks.sweep_records import line, record_of, unmeasured
from multimm_benchmarks.unfinished import Unfinished, give_up, in_order

#: Cores for each process that imports before its turn (arbitrary: most imports use one).
CORES_EACH = 2


class Sweep:
    """A sweep under way.

    Parameters
    ----------
    items : sequence of Item
    kept : Unfinished
        Where records go.
    logs : Path
        Folder for what the groups print.
    console : Console
    limit : Limit
        When it is up, what is left is absent.
    """

    def __init__(
        self, items: Sequence[Item], kept: Unfinished, logs: Path, console: Console, limit: Limit
    ) -> None:
        finished = {key_of(record) for record in kept.records}
        self.left = [item for item in items if item.key not in finished]
        self._kept, self._logs, self._console, self._limit = kept, logs, console, limit
        self._advance: Callable[[int], None] = lambda runs: None
        self._runs = 0  #: that the case under way has had
        self._begun = 0.0  #: seconds after which its group had its turn
        self._ahead: dict[tuple[str, int], Group] = {}  #: that wait for their turn

    def run(self) -> None:
        """Measure all that is left.

        Raises
        ------
        WrongResultError
            If a product of multimm is wrong; nothing is recorded of it.
        """
        with self._progress(), ExitStack() as ahead:
            for item in self.left:
                if item.absent:
                    self._add(item, "absent", item.absent)
            waiting = list(groups(item for item in self.left if not item.absent))
            self._begin_ahead(waiting, ahead)
            # Each has its turn, and who did not come to all of its cases another one.
            needed = [kept_seconds(items) for items in waiting]
            waiting = [
                self._turn(items, self._limit.before(sum(needed[at + 1 :]), needed[at]))
                for at, items in enumerate(waiting)
            ]
            for items in waiting:
                enough = self._limit.left > kept_seconds(items[:1])
                for item in self._turn(items, self._limit) if enough else items:
                    self._add(item, "absent", NOT_BEGUN)

    def _begin_ahead(self, waiting: Sequence[list[Item]], ahead: ExitStack) -> None:
        """Have the processes of all groups import, of a quick sweep on GPUs with cores for that.

        The first one starts workers meanwhile, and nothing is measured yet. They take no GPU.
        """
        machines = [item.machine for items in waiting for item in items]
        on_gpus = any(machine.quick and machine.device == "gpu" for machine in machines)
        if on_gpus and cores() >= CORES_EACH * len(waiting):
            for items in waiting:
                systems = tuple(dict.fromkeys(item.system for item in items))
                self._ahead[items[0].group] = ahead.enter_context(self._made(items, systems))

    def _made(self, items: Sequence[Item], ahead: Sequence[str] = ()) -> Group:
        name, workers = items[0].group
        log = self._logs / f"{name.replace(' ', '-')}-{workers}.log"
        return Group(log, _devices(items), ahead)

    def _turn(self, items: list[Item], limit: Limit) -> list[Item]:
        """Measure the cases of a system until they or its time are over; return those left."""
        while items and limit.left:
            # A group that dies takes one case along, and not the others.
            items = self._group(items, limit)
        return items

    def _group(self, items: list[Item], limit: Limit) -> list[Item]:
        """Measure in one process group, and return what it did not come to."""
        waiting, opened, failed = list(items), set(), False
        self._begun = self._limit.passed
        work = [Work(i.system, i.machine, i.product, i.precision, i.repeats) for i in items]
        try:
            with self._ahead.pop(items[0].group, None) or self._made(items) as group:
                for message in group.messages(job(work), limit):
                    if "opened" in message:
                        opened.add(_system(items[message["opened"]]))
                    if ended := self._heard(items, message):
                        waiting.remove(ended)
                        failed = "done" not in message
            reason = "its process ended early"
        except OutOfTimeError:
            over = not failed and not self._limit.left  # otherwise it may have another turn
            begun = waiting[:1] if over else []
            for item in begun:
                self._add(item, "absent", BROKEN_OFF)
            return waiting[len(begun) :]
        except GroupError as error:
            reason = str(error)
        if failed:
            return waiting
        lost = waiting[:1]
        if lost and _system(lost[0]) not in opened:
            lost = [item for item in waiting if _system(item) == _system(lost[0])]
        for item in lost:
            self._add(item, "failed", reason)
        return [item for item in waiting if item not in lost]

    def _heard(self, items: list[Item], message: Message) -> Item | None:
        """Keep what a message says; return the item that it ends."""
        if "step" in message:
            self._runs += 1
            self._advance(1)
        if "opened" in message and not self._console.is_terminal:
            since, one = self._limit.passed - self._begun, items[message["opened"]]
            self._say(f"{one.system}, {one.machine.workers} x {one.machine.device}: "
                      f"ready {since:.1f} s after its turn began")  # fmt: skip
        for word in ("done", "failed", "wrong"):
            if word in message:
                item = items[message[word]]
                break
        else:
            return None
        if word == "wrong" and item.system == "multimm":
            raise WrongResultError(
                f"{item.product.name}, {item.precision}, {item.machine.workers} workers: "
                f"{message['reason']}"
            )
        if word == "done":
            self._add(item, "done", "", message)
        else:
            text = "wrong result: " if word == "wrong" else ""
            self._add(item, "failed", text + message["reason"])
        return item

    def _add(self, item: Item, status: str, reason: str, message: Message | None = None) -> None:
        record = record_of(item, status, reason, message)
        self._kept.add(record)
        if not item.absent:
            self._advance(item.repeats + 1 - self._runs)  # those that it did without
            self._runs = 0
        if status == "failed" or not (item.absent or self._console.is_terminal):
            self._say(line(record))

    def _say(self, text: str) -> None:
        """Print a line; in a log, where no bar has the time, it begins with the seconds."""
        stamp = "" if self._console.is_terminal else f"{self._limit.passed:4.0f} s  "
        self._console.print(stamp + text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _progress(self) -> Iterator[None]:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
                   TextColumn("left"), TimeRemainingColumn())  # fmt: skip
        runs = sum(item.repeats + 1 for item in self.left if not item.absent)
        console = self._console
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("measuring", total=runs)
            self._advance = lambda runs: progress.advance(bar, runs)
            yield


def _system(item: Item) -> tuple[str, int]:
    """What is opened once in a process group."""
    return item.system, item.machine.workers


def _devices(items: Sequence[Item]) -> str:
    """CUDA_VISIBLE_DEVICES of a group: no more GPUs than it is to use."""
    if items[0].machine.device == "cpu":
        return ""
    most = max(item.machine.workers for item in items)
    return ",".join(gpu.ident for gpu in visible_gpus()[:most])


def sweep(
    asked: Asked,
    output: Path | None,
    console: Console,
    *,
    restart: bool = False,
    items: Sequence[Item] | None = None,
    limit: Limit | None = None,
) -> tuple[list[Record], Path | None]:
    """Run a sweep, or what is left of it.

    Parameters
    ----------
    asked : Asked
    output : Path, optional
        Folder of the records. None records nothing.
    console : rich.console.Console
    restart : bool
        Forget an unfinished sweep in `output`.
    items : sequence of Item, optional
        In place of what `agenda` makes of `asked`.
    limit : Limit, optional
        Default: none, and for a quick sweep `QUICK_SECONDS` from now.

    Returns
    -------
    list of Record, Path or None
        The records, and the file they are in.

    Raises
    ------
    OptionError
        If nothing can be measured here, or another sweep is unfinished there.
    WrongResultError
        If a product of multimm is wrong: what was measured until then stays unpublished.
    """
    limit = limit or (Limit(QUICK_SECONDS) if asked.quick else Limit())
    items = agenda(asked) if items is None else items
    with tempfile.TemporaryDirectory(prefix="multimm-bench-") as temporary:
        folder = output or Path(temporary)
        check_disk(folder)
        header = (
            records.run_header(described()) if output else dict.fromkeys(("schema", *records.RUN))
        )
        if restart:
            give_up(folder)
        planned = [unmeasured(item) for item in items]
        kept = Unfinished(folder, header, asked.as_json(), planned)
        under_way = Sweep(items, kept, Path(temporary), console, limit)
        announce(items, under_way.left, console)
        try:
            under_way.run()
        except KeyboardInterrupt:
            if output:
                console.print(
                    f"{len(kept.records)} of {len(items)} cases are kept in {kept.path}; the same "
                    "command goes on, and --close records them as they are", soft_wrap=True
                )  # fmt: skip
            raise
        found = in_order(kept.records, planned)
        path = records.save(found, kept.header, SCALING, folder) if output else None
        kept.remove()
        return found, path


def announce(items: Sequence[Item], left: Sequence[Item], console: Console) -> None:
    """Say what will be measured, and what will not and why, before anything is."""
    present = [item for item in left if not item.absent]
    counts = sorted({item.machine.workers for item in items})
    text = f"to measure: {len(present)} of {len(items)}, on {', '.join(map(str, counts))} workers"
    if len(left) < len(items):
        text += f"; {len(items) - len(left)} are there from before"
    console.print(text, highlight=False)
    reasons: dict[tuple[str, str], list[str]] = {}
    for item in left:
        if item.absent:
            reasons.setdefault((item.system, item.absent), []).append(item.product.name)
    for (name, reason), cases in reasons.items():
        console.print(f"left out: {name}, {', '.join(dict.fromkeys(cases))}: {reason}",
                      highlight=False, soft_wrap=True)  # fmt: skip
