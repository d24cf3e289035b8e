"""What else is installed under the import name `multimm`.

The distribution `multimm` of the public package index, a modeller of chromatin, has it, too. pip
lets both write to one folder: who comes later overwrites files of the other, and who is
uninstalled takes them away.
"""

from __future__ import annotations

import csv
import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.metadata import distributions as installed
from pathlib import Path

from multimm.errors import DISTRIBUTION, printable

NAME = "multimm"
#: How many files a sentence names.
FEW = 3


def others() -> Iterator[str]:
    """Yield a sentence about each distribution, and about files, that are not ours."""
    for found in installed():
        if (found.name or "").lower() == NAME and not _former(found):
            yield (
                f"{printable(found.name)} {printable(found.version)} is installed, another project "
                f"with the import name {NAME}: it and {DISTRIBUTION} overwrite each other's files"
            )
    try:
        ours = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return  # run from a checkout
    yield from _files(ours)


def _former(found: Distribution) -> bool:
    """Whether it is this project before version 0.2.0, when it had that name."""
    return any(entry.value == "multimm.cli:main" for entry in found.entry_points)


def _files(ours: Distribution) -> Iterator[str]:
    # `Distribution.files` leaves out those that are gone.
    lines = csv.reader((ours.read_text("RECORD") or "").splitlines())
    hashes = {name: digest for name, digest, *_ in lines if name.startswith(f"{NAME}/")}
    if not hashes:
        return  # an editable installation: its files are those of a checkout
    root = Path(str(ours.locate_file("")))
    if changed := [name for name, digest in hashes.items() if _differs(root / name, digest)]:
        yield f"files of {DISTRIBUTION} were replaced or removed: {_few(changed)}"
    there = {path.relative_to(root).as_posix() for path in (root / NAME).rglob("*.py")}
    if foreign := sorted(there - hashes.keys()):
        yield f"files of another project lie in {printable(root / NAME)}: {_few(foreign)}"


def _differs(path: Path, recorded: str) -> bool:
    """Whether a file is not the one that was installed; compiled ones have no digest."""
    kind, _, digest = recorded.partition("=")
    if not digest:
        return False
    try:
        found = hashlib.new(kind, path.read_bytes()).digest()
    except OSError:
        return True
    return urlsafe_b64encode(found).rstrip(b"=").decode() != digest


def _few(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(map(printable, names[:FEW])) + more
