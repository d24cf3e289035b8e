"""Scaling over workers, beside the peers: python -m multimm bench

Every system is measured in a process group of its own, one after the other on the same machine.
What is finished is kept in a file next to the results, so that an interrupted sweep goes on where
it was when the same command is given again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import records
from benchmarks.agenda import Asked, Item, agenda, check_disk, described, groups, key_of
from benchmarks.group import Group, GroupError, Message
from benchmarks.harness import WrongResultError
from benchmarks.peers.__main__ import job
from benchmarks.records import Record
from benchmarks.sweep_cases import STEADY_RATIO
from benchmarks.unfinished import SUITE, Unfinished, give_up, in_order
from multimm.cluster.devices import visible_gpus

#: Why a case has no figure whose sweep was closed before it came to it.
INTERRUPTED = "the sweep was interrupted"


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
    """

    def __init__(
        self, items: Sequence[Item], kept: Unfinished, logs: Path, console: Console
    ) -> None:
        finished = {key_of(record) for record in kept.records}
        self.left = [item for item in items if item.key not in finished]
        self._kept, self._logs, self._console = kept, logs, console
        self._step: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Measure all that is left.

        Raises
        ------
        WrongResultError
            If a product of multimm is wrong; nothing is recorded of it.
        """
        with self._progress():
            for item in self.left:
                if item.absent:
                    self._add(item, "absent", item.absent)
            for items in groups(item for item in self.left if not item.absent):
                while items:  # a group that dies takes one case along, and not the others
                    items = self._group(items)

    def _group(self, items: list[Item]) -> list[Item]:
        """Measure in one process group, and return what it did not come to."""
        first, waiting, opened, failed = items[0], list(items), False, False
        name, workers = first.group
        work = [(item.product, item.precision, item.repeats) for item in items]
        log = self._logs / f"{name.replace(' ', '-')}-{workers}.log"
        try:
            with Group(job(name, first.machine, work), log, _devices(first)) as group:
                for message in group.messages():
                    opened = opened or "opened" in message
                    if ended := self._heard(items, message):
                        waiting.remove(ended)
                        failed = "done" not in message
            reason = "its process ended early"
        except GroupError as error:
            reason = str(error)
        if failed:
            return waiting
        for item in waiting[:1] if opened else waiting:
            self._add(item, "failed", reason)
        return waiting[1:] if opened else []

    def _heard(self, items: list[Item], message: Message) -> Item | None:
        """Keep what a message says; return the item that it ends."""
        if "step" in message:
            self._step()
            return None
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
        if not self._console.is_terminal or status == "failed":
            self._console.print(line(record), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _progress(self) -> Iterator[None]:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
                   TextColumn("left"), TimeRemainingColumn())  # fmt: skip
        runs = sum(item.repeats + 1 for item in self.left if not item.absent)
        console = self._console
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("measuring", total=runs)
            self._step = lambda: progress.advance(bar)
            yield


def _devices(item: Item) -> str:
    """CUDA_VISIBLE_DEVICES of a group: no more GPUs than it is to use."""
    if item.machine.device == "cpu":
        return ""
    return ",".join(gpu.ident for gpu in visible_gpus()[: item.machine.workers])


def record_of(item: Item, status: str, reason: str, message: Message | None = None) -> Record:
    """Return the record of an item: measured, failed or absent."""
    product, said = item.product, dict(message or {})
    shape = (product.m, product.n, product.k)
    seconds = said.pop("seconds", [])
    detail = {
        "workers": item.machine.workers, "device": item.machine.device,
        "scaling": product.scaling, "predicted_seconds": None, "one_worker_tflops": None,
        "status": status, "reason": reason, "config": said.pop("config", ""),
        **said.pop("detail", {}),
    }  # fmt: skip
    more: dict[str, Any] = {"precision": item.precision, "detail": detail}
    if not seconds:
        return records.unmeasured(product.name, item.system, shape, **more)
    more |= said.pop("errors")
    more |= {key: said[key] for key in records.KEYS if key in said}
    made = records.record(
        product.name, item.system, shape, seconds, flops=product.flops, timing="host", **more
    )
    if product.kind == "steady":
        ratio = max(seconds) / made["median"]
        detail |= {"slowest_over_median": round(ratio, 4), "steady": ratio <= STEADY_RATIO}
    return made


def _unmeasured(item: Item) -> Record:
    """The record of an item that its sweep does not come to."""
    status, reason = ("absent", item.absent) if item.absent else ("failed", INTERRUPTED)
    return record_of(item, status, reason)


def line(record: Record) -> str:
    """One line about a record."""
    detail = record["detail"]
    name = f"{record['case']}, {record['system']}, {detail['workers']} x {detail['device']}"
    if detail["status"] != "done":
        return f"{name}, {record['precision']}: {detail['status']}, {detail['reason']}"
    return (
        f"{name}, {record['precision']}: {record['median']:.4g} s, {record['tflops']:.4g} TFLOP/s, "
        f"off by {record['componentwise_u']} u"
    )


def sweep(
    asked: Asked,
    output: Path | None,
    console: Console,
    *,
    restart: bool = False,
    items: Sequence[Item] | None = None,
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
    items = agenda(asked) if items is None else items
    with tempfile.TemporaryDirectory(prefix="multimm-bench-") as temporary:
        folder = output or Path(temporary)
        check_disk(folder)
        header = (
            records.run_header(described()) if output else dict.fromkeys(("schema", *records.RUN))
        )
        if restart:
            give_up(folder)
        planned = [_unmeasured(item) for item in items]
        kept = Unfinished(folder, header, asked.as_json(), planned)
        under_way = Sweep(items, kept, Path(temporary), console)
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
        path = records.save(found, kept.header, SUITE, folder) if output else None
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
