"""A sweep that is under way: what it has measured, so that the same command can go on.

One JSON object a line: the run's header with what was asked for and is to be measured, then a
record after each case.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multimm.errors import OptionError
from multimm_benchmarks.agenda import key_of
from multimm_benchmarks.records import Record, save
from multimm_benchmarks.report.runs import SCALING

NAME = f"unfinished-{SCALING}.jsonl"


class Unfinished:
    """The file of an unfinished sweep.

    Parameters
    ----------
    folder : Path
        Where the finished run will lie.
    header : dict
        As `multimm_benchmarks.records.run_header` returns it. Of a sweep that is taken up again the
        first header stays, with its date.
    asked : dict
        What the sweep was asked for; JSON values.
    planned : sequence of dict
        A record of each case, as it is if the case is never measured.

    Raises
    ------
    OptionError
        If a sweep of another commit, machine or question is unfinished.
    """

    def __init__(
        self, folder: Path, header: Record, asked: dict[str, Any], planned: Sequence[Record] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self.header = header
        self.records: list[Record] = []
        if not self.path.exists():
            self._append({"run": header, "asked": asked, "planned": list(planned)}, "x")
            return
        first, *rest = _lines(self.path)
        if reason := _differs(first, header, asked):
            raise OptionError(
                f"{self.path} holds an unfinished sweep of {reason}: finish it as it was begun, "
                "or give it up with --restart"
            )
        self.header, self.records = first["run"], rest

    def add(self, record: Record) -> None:
        """Keep a record, on disk when this returns."""
        self.records.append(record)
        self._append(record, "a")

    def _append(self, value: Any, mode: str) -> None:
        with self.path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """The sweep is over, and recorded elsewhere."""
        self.path.unlink()


def give_up(folder: Path) -> None:
    """Forget an unfinished sweep, if there is one."""
    (folder / NAME).unlink(missing_ok=True)


def in_order(found: Sequence[Record], planned: Sequence[Record]) -> list[Record]:
    """Return records in the order that was planned, not in that of their measurement."""
    places = {key_of(record): place for place, record in enumerate(planned)}
    return sorted(found, key=lambda record: places[key_of(record)])


def close(folder: Path) -> tuple[list[Record], Path]:
    """Record an unfinished sweep as it is: cases without a record as interrupted.

    Returns
    -------
    list of Record, Path
        The records, and the file they are in.

    Raises
    ------
    OptionError
        If no sweep is unfinished there.
    """
    path = folder / NAME
    if not path.exists():
        raise OptionError(f"{folder} holds no unfinished sweep: there is nothing to close")
    first, *measured = _lines(path)
    known = {key_of(record) for record in measured}
    missing = [record for record in first["planned"] if key_of(record) not in known]
    found = in_order(measured + missing, first["planned"])
    written = save(found, first["run"], SCALING, folder)
    path.unlink()
    return [first["run"] | record for record in found], written


def _lines(path: Path) -> list[Any]:
    lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # the sweep died while it wrote this line
    if not lines or set(lines[0]) != {"run", "asked", "planned"}:
        raise OptionError(f"{path} cannot be read: give it up with --restart")
    # What follows is appended: a torn line must not stay in front of it.
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return lines


def _differs(first: dict[str, Any], header: Record, asked: dict[str, Any]) -> str:
    for name in ("schema", "commit", "machine", "versions"):
        if first["run"].get(name) != header[name]:
            return f"another {name} ({first['run'].get(name)})"
    if first["asked"] != asked:
        return f"other cases ({first['asked']})"
    return ""
