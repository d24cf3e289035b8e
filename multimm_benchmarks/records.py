"""Records: what a run of the benchmarks measured, on what, and of which commit.

A file of results/ is one run: what all its records share is written once, as "run". `load` gives
every record its full set of keys.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multimm import __version__
from multimm.errors import checkout

Record = dict[str, Any]

#: The checkout that runs, if it is one; where records go, and come from.
ROOT = checkout()
RESULTS = ROOT / "benchmarks" / "results" if ROOT else Path("multimm-records")

#: What `run_header` calls the form of a file. Files without a number are of version 1, in which
#: every record has seconds; from version 2 on a case that failed is recorded without.
SCHEMA = 2
KNOWN_SCHEMAS = (1, 2)

#: Why a case has no figure whose sweep was closed before it came to it.
INTERRUPTED = "the sweep was interrupted"
#: ... and in the reason of what it was asked to leave out.
LEFT_OUT = "more than --longest"

#: The keys of a record, in the order in which they are written. Those of RUN are shared.
RUN = ("commit", "date", "machine", "versions")
KEYS = (
    "case", *RUN, "shape", "precision", "system", "seconds", "median", "tflops", "ratio_vs",
    "rel_error", "componentwise_u", "bytes_received", "bytes_predicted", "peak_bytes", "plan",
    # How the seconds were taken ("graph", "events", "host") and, where bytes are what counts,
    # how many a second; sustained figures; whatever only this case has.
    "timing", "gbs", "sustained", "detail",
    # The root mean square of what componentwise_u is the largest of.
    "rms_u",
)  # fmt: skip

PACKAGES = (
    "numpy", "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda", "dask", "distributed",
    "nvidia-cublas", "nvidia-cuda-nvrtc", "jax",
)  # fmt: skip


def commit() -> str:
    """Return the commit that is measured: MULTIMM_COMMIT, or what git says.

    Of an installed package, its version.

    Raises
    ------
    RuntimeError
        If neither knows; a figure without its commit is worth nothing.
    """
    if given := os.environ.get("MULTIMM_COMMIT", "").strip():
        return given
    if ROOT is None:
        return f"v{__version__}"
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        raise RuntimeError(
            "the commit is unknown: this is no git checkout with a commit; set MULTIMM_COMMIT to "
            "the output of 'git rev-parse HEAD'"
        ) from None
    return head + ("-changed" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_header(machine: Mapping[str, Any]) -> Record:
    """Return what all records of a run share."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    header = {"commit": commit(), "date": now, "machine": dict(machine), "versions": versions}
    return {"schema": SCHEMA, **header}


def record(
    case: str,
    system: str,
    shape: Sequence[int],
    seconds: Sequence[float],
    *,
    flops: float = 0,
    moved: float = 0,
    **more: Any,
) -> Record:
    """Return a record of timed runs, without what the run shares.

    Parameters
    ----------
    case, system : str
    shape : sequence of int
    seconds : sequence of float
        Of all runs, per call.
    flops, moved : float
        Operations, and bytes read and written, of one call.
    **more
        Other keys of a record.
    """
    _check(more)
    median = statistics.median(seconds)
    fields = {
        "case": case, "system": system, "shape": list(shape), "precision": "ieee",
        "seconds": [float(f"{x:.6g}") for x in seconds], "median": float(f"{median:.6g}"),
        "tflops": float(f"{flops / median / 1e12:.6g}") if flops else None,
        "gbs": float(f"{moved / median / 1e9:.6g}") if moved else None,
        **more,
    }  # fmt: skip
    return {key: fields[key] for key in KEYS if fields.get(key) is not None}


def unmeasured(case: str, system: str, shape: Sequence[int], **more: Any) -> Record:
    """Return a record of what was to be timed and was not; `more` should say why."""
    _check(more)
    fields = {"case": case, "system": system, "shape": list(shape), "seconds": [], **more}
    return {key: fields[key] for key in KEYS if fields.get(key) is not None}


def _check(more: Mapping[str, Any]) -> None:
    if unknown := set(more) - set(KEYS):
        raise ValueError(f"records have no key {sorted(unknown)}; known are {KEYS}")


def save(records: Iterable[Record], header: Record, suite: str, folder: Path) -> Path:
    """Write one run to a new file, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = header["date"].replace(":", "").replace("-", "")
    path = folder / f"{suite}-{stamp}.json"
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in records)
    text = f'{{\n "run": {json.dumps(header)},\n "records": [\n{lines}\n ]\n}}\n'
    with path.open("x", encoding="utf-8") as file:  # a record is never written over
        file.write(text)
    return path


def load(path: Path) -> list[Record]:
    """Return the records of a run with all their keys; None is what does not apply.

    Raises
    ------
    ValueError
        If the file is no such run, or one of a version that is not known here.
    """
    content = json.loads(path.read_text("utf-8"))
    if not isinstance(content, dict) or set(content) != {"run", "records"}:
        raise ValueError(f"{path}: no run of the benchmarks")
    version = content["run"].pop("schema", 1)
    if version not in KNOWN_SCHEMAS:
        raise ValueError(
            f"{path}: records of version {version}; this commit reads "
            f"{' and '.join(map(str, KNOWN_SCHEMAS))}"
        )
    if set(content["run"]) != set(RUN):
        raise ValueError(f"{path}: no run of the benchmarks; it has {sorted(content['run'])}")
    loaded = []
    for entry in content["records"]:
        if unknown := set(entry) - set(KEYS):
            raise ValueError(f"{path}: unknown keys {sorted(unknown)}")
        loaded.append({key: {**content["run"], **entry}.get(key) for key in KEYS})
    return loaded
