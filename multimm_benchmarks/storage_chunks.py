"""Products of Zarr stores on workers with little memory: is a worker killed whose plan fits?

    python -m multimm_benchmarks.storage_chunks [--folder DIR] [--only FIRST:LAST]

A is written, opened, multiplied and written for each case, on workers that a nanny ends at their
limit. What is planned and what happened is printed line by line; the exit status is 1 if a worker
was killed although its plan fits, or if a product is wrong. Some 40 minutes on two cores, 3 GB of
disk.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import dask
import numpy as np
import zarr
from distributed import Client, LocalCluster
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

import multimm
from multimm.errors import MemoryBudgetError
from multimm.graph.lowering.operand import storage_of

#: Bytes of A, at least; it has two chunks at least, too.
LEAST = 200e6
#: Bytes of B and of C, at most, and columns of both.
MOST, COLUMNS = 200e6, 500
#: Columns of a tall chunk, rows of a wide one.
THIN = 50
#: Rows of the product that are computed again in double precision.
LOOKED_AT = 16
#: Bytes that are made at a time.
AT_ONCE = 2**24
CODECS: dict[str, Any] = {
    "none": None,
    "zstd": ZstdCodec(),
    "gzip": GzipCodec(level=1),
    "blosc": BloscCodec(),
}


class Case(NamedTuple):
    """One product."""

    megabytes: float  #: of a storage chunk
    form: str  #: of a storage chunk
    codec: str
    noise: bool  #: values that no codec makes smaller
    dtype: str
    limit: int  #: bytes of each worker
    workers: int
    threads: int

    @property
    def chunk(self) -> tuple[int, int]:
        """Rows and columns of a storage chunk."""
        elements = self.megabytes * 1e6 / 4
        thin = THIN if self.megabytes >= 8 else THIN // 5
        if self.form == "square":
            return math.isqrt(int(elements)), math.isqrt(int(elements))
        long = int(elements / thin)
        return (long, thin) if self.form == "tall" else (thin, long)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n and k."""
        rows, columns = self.chunk
        chunks = max(2, math.ceil(LEAST / (rows * columns * 4)))
        if self.form == "tall":
            m, k = rows, columns * chunks
        elif self.form == "wide":
            m, k = rows * chunks, columns
        else:
            side = math.ceil(math.sqrt(chunks))
            m, k = rows * side, columns * math.ceil(chunks / side)
        return m, int(max(1, min(COLUMNS, MOST / 4 / max(m, k)))), k


def cases() -> list[Case]:
    """All 40: each size and form of chunks, each with another codec and other workers."""
    sizes, forms = (1, 4, 16, 40, 80, 150, 250, 500), ("tall", "square", "wide")
    codecs = ("none", "zstd", "gzip", "blosc")
    limits, crowds = (512e6, 1e9, 2e9), ((2, 1), (1, 1), (2, 2), (1, 2), (2, 1))
    found = [
        Case(
            size,
            form,
            codecs[(i + i // 4) % len(codecs)],
            noise=i % 2 == 0,
            dtype=(">f4" if i % 5 == 4 else "<f4"),
            limit=int(limits[(i + i // 3) % len(limits)]),
            workers=crowds[i % len(crowds)][0],
            threads=crowds[i % len(crowds)][1],
        )
        for i, (size, form) in enumerate(product(sizes, forms))
    ]
    # Those that are near the limit: large chunks, as little memory as they may do with.
    near = product((40, 80, 150, 250), ("tall", "wide"), (("none", 512e6), ("zstd", 1e9)))
    found += [
        Case(size, form, codec, True, "<f4", int(limit), 2, 1)
        for size, form, (codec, limit) in near
    ]
    return found


def values(rows: np.ndarray[Any, Any], columns: np.ndarray[Any, Any], *, noise: bool) -> Any:
    """Elements by their places: any part of a matrix can be made by itself."""
    mixed = rows[:, None] * np.uint32(2654435761) ^ columns[None, :] * np.uint32(2246822519)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(3266489917)
    mixed ^= mixed >> np.uint32(13)
    if not noise:
        mixed &= np.uint32(0xC0000000)
    return mixed.astype("f4") / np.float32(2**31) - np.float32(1)


def write(path: Path, shape: tuple[int, int], chunk: tuple[int, int], case: Case) -> None:
    """Write a store chunk by chunk."""
    store = zarr.create_array(
        path, shape=shape, chunks=chunk, dtype=case.dtype, compressors=CODECS[case.codec]
    )
    starts = product(*(range(0, size, edge) for size, edge in zip(shape, chunk, strict=True)))
    for row, column in starts:
        rows = np.arange(row, min(shape[0], row + chunk[0]), dtype=np.uint32)
        columns = np.arange(column, min(shape[1], column + chunk[1]), dtype=np.uint32)
        part = np.empty((len(rows), len(columns)), case.dtype)
        step = max(1, AT_ONCE // (4 * len(columns)))
        for first in range(0, len(rows), step):
            at = slice(first, first + step)
            part[at] = values(rows[at], columns, noise=case.noise)
        store[row : row + chunk[0], column : column + chunk[1]] = part


def right(c: Any, a: Any, b: Any, case: Case) -> bool:
    """Whether some rows of the product are those of double precision."""
    m, n, k = case.sizes
    rows = np.unique(np.linspace(0, m - 1, LOOKED_AT).astype(np.uint32))
    expected, allowed = np.zeros((len(rows), n)), np.zeros((len(rows), n))
    step = max(1, AT_ONCE // (8 * max(n, len(rows))))
    for first in range(0, k, step):
        columns = np.arange(first, min(k, first + step), dtype=np.uint32)
        left = values(rows, columns, noise=case.noise).astype("f8")
        part = np.asarray(b[first : first + len(columns)], "f8")
        expected += left @ part
        allowed += np.abs(left) @ np.abs(part)
    found = np.stack([np.asarray(c[int(row)], "f8") for row in rows])
    return bool((np.abs(found - expected) <= (k + 2) * 2.0**-24 * allowed).all())


class Outcome(NamedTuple):
    """What was planned, and what happened."""

    fits: bool
    killed: int = 0  #: workers
    right: bool | None = None  #: None: it was not computed
    predicted: float = 0.0  #: seconds
    measured: float = 0.0
    peak: float = 0.0  #: of the limit, resident memory of the fullest worker
    text: str = ""

    @property
    def bad(self) -> bool:
        """A plan that fits has failed."""
        return self.fits and (bool(self.killed) or not self.right)


def processes(client: Client) -> set[int]:
    """Numbers of the workers' processes."""
    return set(client.run(os.getpid).values())


def most_resident() -> int:
    """Bytes that the process has had in memory, at most."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def run(case: Case, folder: Path) -> Outcome:
    """Plan and compute one product, on a cluster of its own."""
    m, n, k = case.sizes
    write(folder / "a.zarr", (m, k), case.chunk, case)
    plain = case._replace(codec="none", dtype="<f4")
    write(folder / "b.zarr", (k, n), (max(1, min(k, 500_000 // n)), n), plain)
    cluster = LocalCluster(
        n_workers=case.workers,
        threads_per_worker=case.threads,
        memory_limit=case.limit,
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
    )
    with cluster, Client(cluster) as client:
        client.wait_for_workers(case.workers)
        a, b = (multimm.io.open_array(folder / f"{name}.zarr") for name in "ab")
        try:
            plan = multimm.plan(a, b)
        except MemoryBudgetError as error:
            return Outcome(False, text=str(error))
        stored = storage_of(a)
        assert stored is not None
        if not plan.fits:
            return Outcome(False, text=f"{plan.peak_bytes:,} of {plan.budget_bytes:,} bytes")
        before, begun = processes(client), time.perf_counter()
        failed = ""
        try:
            multimm.io.save_array(multimm.matmul(a, b), folder / "c.npy")
        except Exception as error:  # whatever a killed worker leads to
            failed = f"{type(error).__name__}: {error}".splitlines()[0]
        seconds = time.perf_counter() - begun
        client.wait_for_workers(case.workers)
        killed = len(before - processes(client))
        peak = max(client.run(most_resident).values()) / case.limit
    found = not failed and right(np.load(folder / "c.npy", mmap_mode="r"), a, _array(folder), case)
    return Outcome(True, killed, found, plan.seconds, seconds, peak, failed or _blocks(plan))


def _array(folder: Path) -> Any:
    return zarr.open_array(folder / "b.zarr", mode="r")


def _blocks(plan: Any) -> str:
    layout = plan.layout
    sizes = " x ".join(str(max(x)) for x in (layout.m_blocks, layout.n_blocks, layout.k_tiles))
    return f"blocks {sizes}, {layout.row_panels} row panels"


def main() -> int:
    """Run the cases that are asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--folder", help="where stores are written, each for its case")
    parser.add_argument("--only", default=":", help="cases from FIRST to before LAST")
    options = parser.parse_args()
    first, _, last = options.only.partition(":")
    chosen = list(enumerate(cases()))[int(first or 0) : int(last or len(cases()))]
    outcomes = []
    for number, case in chosen:
        folder = Path(tempfile.mkdtemp(prefix="storage-chunks-", dir=options.folder))
        try:
            with dask.config.set({"distributed.admin.system-monitor.gil.enabled": False}):
                found = run(case, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        outcomes.append(found)
        m, n, k = case.sizes
        values_are = "noise" if case.noise else "few values"
        print(
            f"{number:2} {case.megabytes:g} MB {case.form} {case.codec} {case.dtype} {values_are}, "
            f"{m} x {k} @ {k} x {n}, {case.workers} x {case.threads} of {case.limit / 1e6:.0f} MB: "
            + (
                f"fits, killed {found.killed}, right {found.right}, {found.predicted:.1f} s "
                f"predicted, {found.measured:.1f} measured, peak {found.peak:.0%} of the limit, "
                if found.fits
                else "does not fit: "
            )
            + found.text,
            flush=True,
        )
    fit = [x for x in outcomes if x.fits]
    bad = sum(x.bad for x in outcomes)
    print(
        f"{len(outcomes)} runs: {len(fit)} fit, {sum(bool(x.killed) for x in fit)} of them killed, "
        f"{sum(x.right is False for x in fit)} wrong or failed"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
