"""Sums over axes of two and more arrays: multimm.einsum, dask.array.einsum, and bare products.

    python -m multimm_benchmarks.contractions [--workers N | --gpus N] [--gflop G] [--only WORD]
                                              [--output DIR]

Twenty cases from users of xarray, of tensor networks and of quantum chemistry. Operands are in
memory before the clock starts, made anew for each run: what one system copied to a worker would
spare the other one the transfer. Where their chunks lie is Dask's choice, another one in each
round, and in a round the same for both systems. Seconds are the least of all rounds, bytes their
mean. `matmul` multiplies two matrices, or stacks, of the same number of operations, in chunks of
as many elements. Results of both are compared elementwise. The exit status is 1 if one is wrong.
`--output` writes a record into a folder.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.base import annotate
from distributed import Client, wait

import multimm
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm_benchmarks import records
from multimm_benchmarks.machine import described
from multimm_benchmarks.peers.on_dask import synchronize

#: Operations of a case on CPU workers and on GPUs, in 1e9, and bytes of its largest array at most.
GFLOP, GPU_GFLOP = 4.0, 8_000.0
LARGEST, GPU_LARGEST = 2e8, 4e9


class Case(NamedTuple):
    """One contraction: sizes are proportions, and change with the number of operations."""

    name: str
    subscripts: str
    proportions: str
    parts: str  #: chunks along a label; 1 where it is not named
    fixed: str = ""  #: labels whose sizes do not change

    @property
    def sizes(self) -> dict[str, int]:
        return _numbers(self.proportions)

    @property
    def cuts(self) -> dict[str, int]:
        return _numbers(self.parts)


def _numbers(text: str) -> dict[str, int]:
    return {label: int(size) for label, size in (one.split("=") for one in text.split())}


CASES = (
    # xarray: fields over time (t), levels (z), members (e), latitude (x) and longitude (y).
    Case("EOF: covariance", "txy,tuv->xyuv", "t=400 x=16 y=32 u=16 v=32", "t=8"),
    Case("EOF: of one field", "txy,tuv->xyuv", "t=400 x=16 y=32", "t=8"),
    Case("projection on modes", "txy,mxy->tm", "t=2000 m=50 x=60 y=120", "t=8"),
    Case("fields from modes", "tm,mxy->txy", "t=1000 m=50 x=60 y=120", "t=4 x=2"),
    Case("regridding", "tzxy,xyp->tzp", "t=60 z=10 x=30 y=60 p=900", "t=6 z=2"),
    Case("spectral transform", "tzy,yk->tzk", "t=200 z=20 y=300 k=300", "t=8"),
    Case("covariance by level", "ztx,ztu->zxu", "z=8 t=500 x=200 u=200", "z=8"),
    Case("ensemble overlap", "etx,ftx->ef", "e=120 f=120 t=60 x=500", "e=2 f=2 t=4"),
    Case("weighted sums", "txy,xy->t", "t=2000 x=100 y=200", "t=8"),
    # Tensor networks.
    Case("MPS: two sites", "apb,bqc->apqc", "a=300 b=300 c=300 p=4 q=4",
         "a=2 b=2 c=2", "pq"),
    Case("MPS: environment", "apb,apc->bc", "a=400 b=400 c=400 p=4", "a=4 b=2 c=2", "p"),
    Case("gate on two sites", "apqc,pqrs->arsc", "a=300 c=300 p=8 q=8 r=8 s=8",
         "a=4 c=2", "pqrs"),
    Case("PEPS: edge", "abcd,cdef->abef", "a=24 b=24 c=24 d=24 e=24 f=24",
         "a=2 c=2 e=2"),
    Case("MPO on MPS", "axb,apqd,bqc->xpdc", "a=60 x=60 b=60 c=60 p=4 q=4 d=8",
         "b=2 c=2 x=2", "pqd"),
    Case("transfer matrix", "abcd,ebfd->acef", "a=30 b=30 c=30 d=30 e=30 f=30",
         "a=2 b=2 e=2"),
    # Quantum chemistry: occupied (i, j, m), virtual (a, b, e, f) and atomic (p, q, r, s) orbitals.
    Case("AO to MO", "pqrs,pi->iqrs", "p=60 q=60 r=60 s=60 i=60", "p=2 q=2 r=2"),
    Case("AO to MO, two indices", "pqrs,pi,qj->ijrs", "p=50 q=50 r=50 s=50 i=20 j=20",
         "p=2 r=2 s=2"),
    Case("CCSD ladder", "abef,ijef->abij", "a=40 b=40 e=40 f=40 i=10 j=10",
         "a=2 b=2 e=2"),
    Case("CCSD ring", "mbej,aeim->abij", "m=20 b=40 e=40 j=20 a=40 i=20",
         "m=2 b=2 a=2"),
    Case("density fitting", "Lpq,Lrs->pqrs", "L=300 p=30 q=30", "L=4 p=2"),
)  # fmt: skip


#: For each operand the worker of each chunk.
Lie = list[dict[tuple[int, ...], str]]


class Found(NamedTuple):
    """What was measured of a case."""

    case: Case
    gflop: float
    sizes: dict[str, int]
    runs: dict[str, list[float]]  #: seconds of each, by system
    received: dict[str, float]  #: bytes, mean of all rounds
    error: float  #: largest difference from Dask's, in units of the largest element

    @property
    def seconds(self) -> dict[str, float]:
        """The least of each system."""
        return {name: min(own) for name, own in self.runs.items()}


def resized(case: Case, gflop: float, largest: float, itemsize: int = 4) -> dict[str, int]:
    """Sizes for about so many operations, and arrays of no more than so many bytes."""
    terms, _, out = case.subscripts.partition("->")
    known = case.sizes
    # Of one array twice the second one's labels have the sizes of the first one's.
    pairs = [(x, y) for own in terms.split(",") for x, y in zip(own, terms, strict=False)]
    alias = {x: y for x, y in pairs if x not in known}
    free = [x for x in known if x not in case.fixed]

    def at(factor: float) -> dict[str, int]:
        # A multiple of four, and of the chunks.
        step = {x: 4 * case.cuts.get(x, 1) for x in free}
        scaled = {x: max(1, round(known[x] * factor / step[x])) * step[x] for x in free}
        found = known | scaled
        return found | {x: found[y] for x, y in alias.items()}

    def fits(sizes: dict[str, int]) -> bool:
        arrays = [*terms.split(","), out]
        most = max(math.prod(sizes[x] for x in own) for own in arrays)
        return operations(case, sizes) <= 1e9 * gflop and most * itemsize <= largest

    factor = 16.0
    while factor > 0.05 and not fits(at(factor)):
        factor /= 1.05
    return at(factor)


def operations(case: Case, sizes: dict[str, int]) -> float:
    """Of the products, two at a time."""
    terms, _, out = case.subscripts.partition("->")
    inputs = terms.split(",")
    if len(inputs) == 2:
        return 2.0 * math.prod(sizes[x] for x in {*terms} - {","})
    import opt_einsum  # type: ignore[import-untyped]

    shapes = [tuple(sizes[x] for x in own) for own in inputs]
    _, info = opt_einsum.contract_path(f"{terms}->{out}", *shapes, shapes=True)
    return float(info.opt_cost)


def operands(
    case: Case, sizes: dict[str, int], cupy: bool, lie: Lie | None = None
) -> list[da.Array]:
    """Random arrays, in memory, where chunks are to lie; one twice where the case has it so."""
    terms = case.subscripts.partition("->")[0].split(",")
    made: list[da.Array] = []
    for n, own in enumerate(terms):
        if any(x not in case.sizes for x in own):
            made.append(made[0])
            continue
        chunks = tuple(-(-sizes[x] // case.cuts.get(x, 1)) for x in own)
        at = partial(_worker, lie[n]) if lie else None
        with annotate(**{"workers": at} if at else {}):
            made.append(_random(tuple(sizes[x] for x in own), chunks, n, cupy))
    wait(made)
    return made


def _worker(at: dict[tuple[int, ...], str], key: Any) -> str:
    return at[key[1:]]


def lying(client: Client, made: list[da.Array]) -> Lie:
    """Where chunks of arrays lie."""
    return [{key[1:]: at[0] for key, at in client.who_has(x).items()} for x in made]


def _random(shape: tuple[int, ...], chunks: Any, seed: int, cupy: bool) -> da.Array:
    if not cupy:
        rng = da.random.default_rng(seed)
        made: da.Array = rng.standard_normal(shape, chunks=chunks, dtype="float32").persist()
        return made
    paper = da.empty(shape, chunks=chunks, dtype="float32")
    made = da.map_blocks(
        _on_gpu, chunks=paper.chunks, dtype="float32", meta=_gpu_meta(len(shape)), seed=seed
    ).persist()
    return made


def _on_gpu(seed: int, block_info: Any) -> Any:
    import cupy

    place = block_info[None]
    rng = cupy.random.default_rng([seed, *place["chunk-location"]])
    return rng.standard_normal(place["chunk-shape"], dtype=np.float32)


def _gpu_meta(ndim: int) -> Any:
    import cupy

    return cupy.empty((0,) * ndim, dtype=np.float32)


def matrices(case: Case, sizes: dict[str, int], cupy: bool) -> list[da.Array]:
    """Two of them, or stacks, whose product is as large; in memory."""
    a, b, out = _terms(case)
    groups = [
        [x for x in a if x in b and x in out],
        [x for x in a if x not in b],
        [x for x in a if x in b and x not in out],
        [x for x in b if x not in a],
    ]
    batch, m, k, n = (math.prod(sizes[x] for x in own) for own in groups)
    cut = [math.prod(case.cuts.get(x, 1) for x in own) for own in groups]
    parts = [-(-size // count) for size, count in zip((batch, m, k, n), cut, strict=True)]
    if case.sizes.keys() < {*a, *b}:  # one array twice: kept as k x m
        x = _random((k, m), (parts[2], parts[1]), 0, cupy)
        wait(x)
        return [x.T, x]
    alone = groups[0] == []
    left = _random((batch, m, k)[alone:], (parts[0], parts[1], parts[2])[alone:], 0, cupy)
    right = _random((batch, k, n)[alone:], (parts[0], parts[2], parts[3])[alone:], 1, cupy)
    wait([left, right])
    return [left, right]


def _terms(case: Case) -> list[str]:
    """Subscripts of the operands, and of the result."""
    inputs, _, out = case.subscripts.partition("->")
    return [*inputs.split(","), out]


def measured(client: Client, case: Case, options: argparse.Namespace) -> Found:
    """The least seconds of each system, in turns, and what travels on average."""
    cupy = bool(options.gpus)
    sizes = resized(case, options.gflop, GPU_LARGEST if cupy else LARGEST)
    calls: dict[str, Callable[..., da.Array]] = {
        "multimm": partial(multimm.einsum, case.subscripts),
        "dask": partial(da.einsum, case.subscripts, optimize=True),
    }
    if len(_terms(case)) == 3:
        calls["matmul"] = multimm.matmul
    runs: dict[str, list[float]] = {name: [] for name in calls}
    received: dict[str, list[int]] = {name: [] for name in calls}
    error = 0.0
    for turn in range(options.rounds + 1):  # the first is not timed
        kept, lie = {}, None
        for name, call in calls.items():
            _until_gone(client)
            if name == "matmul":
                given = matrices(case, sizes, cupy)
            else:
                given = operands(case, sizes, cupy, lie)
                lie = lie or lying(client, given)
            if cupy:
                client.run(synchronize)
            reset_received_bytes(client)
            start = time.perf_counter()
            result = call(*given).persist()
            _computed(result)
            if cupy:  # tasks of Dask's end once kernels are launched
                client.run(synchronize)
            passed = time.perf_counter() - start
            received[name].append(sum(received_bytes(client).values()))
            if turn:
                runs[name].append(passed)
            else:
                kept[name] = np.asarray(result.compute()) if not cupy else result
            del result, given
        if not turn:
            error = _difference(kept["multimm"], kept["dask"])
        kept.clear()
    means = {name: statistics.fmean(own) for name, own in received.items()}
    return Found(case, operations(case, sizes) / 1e9, sizes, runs, means, error)


def _difference(ours: Any, theirs: Any) -> float:
    """The largest, in units of the largest element."""
    found = abs(ours - theirs).max() / abs(theirs).max()
    return float(found.compute() if isinstance(found, da.Array) else found)


def _computed(result: da.Array) -> None:
    """Wait for all blocks; raise what one of them was not computed for."""
    for future in wait(result).done:
        if future.status != "finished":
            future.result()


def _until_gone(client: Client) -> None:
    """Wait until no more is in memory than what is asked for: a result has the same keys again."""
    while client.run_on_scheduler(_unasked):
        time.sleep(0.02)


def _unasked(dask_scheduler: Any) -> int:
    """Blocks in memory that no client wants."""
    return sum(bool(ts.who_has) and not ts.who_wants for ts in dask_scheduler.tasks.values())


def lines(found: list[Found]) -> Iterator[str]:
    """The table."""
    names = ("multimm", "dask", "matmul")
    yield (
        f"{'case':24s}{'GFLOP':>9s}" + "".join(f"{name + ' s':>11s}" for name in names)
        + f"{'x dask':>8s}{'x matmul':>9s}{'MB':>9s}{'dask MB':>9s}{'MB/dask':>9s}{'error':>9s}"
    )  # fmt: skip
    for one in found:
        own = one.seconds
        ours = own["multimm"]
        cells = "".join(f"{own[name]:11.4f}" if name in own else f"{'-':>11s}" for name in names)
        bare = f"{own['matmul'] / ours:9.2f}" if "matmul" in own else f"{'-':>9s}"
        moved = [one.received[name] / 1e6 for name in names[:2]]
        yield (
            f"{one.case.name:24s}{one.gflop:9.1f}{cells}{own['dask'] / ours:8.2f}{bare}"
            f"{moved[0]:9.1f}{moved[1]:9.1f}{_share(*moved):>9s}{one.error:9.1e}"
        )
    for peer in names[1:]:
        ratios = [x.seconds[peer] / x.seconds["multimm"] for x in found if peer in x.seconds]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            yield f"{peer} takes {mean:.2f} times as long, geometric mean of {len(ratios)}"
    moved_all = [sum(x.received[name] for x in found) / 1e6 for name in names[:2]]
    yield (
        f"moved: {moved_all[0]:.0f} MB, dask {moved_all[1]:.0f} MB: {_share(*moved_all)} of dask's"
    )


def recorded(found: list[Found], options: argparse.Namespace) -> Path:
    """Write what was measured as records; return the file."""
    device = "gpu" if options.gpus else "cpu"
    detail = {"workers": options.gpus or options.workers, "device": device}
    entries = [
        records.record(
            f"contractions {one.case.name}", name, [*one.sizes.values()], runs,
            flops=1e9 * one.gflop, precision="float32", timing="host",
            bytes_received=round(one.received[name]),
            rel_error=float(f"{one.error:.3g}") if name == "multimm" else None,
            ratio_vs={peer: round(min(other) / min(runs), 4)
                      for peer, other in one.runs.items() if peer != name},
            detail={**detail, "subscripts": one.case.subscripts, "sizes": one.sizes},
        )
        for one in found for name, runs in one.runs.items()
    ]  # fmt: skip
    header = records.run_header(described(options.gpus))
    return records.save(entries, header, "contractions", options.output)


def _share(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs else "-"


@contextmanager
def cluster(options: argparse.Namespace) -> Iterator[Client]:
    """Workers that count what they receive."""
    if options.gpus:
        with multimm.cluster.start(gpus=options.gpus) as client:
            yield client
    else:
        with multimm.cluster.start(workers=options.workers, memory_limit="3GB") as client:
            yield client


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="CPU workers")
    parser.add_argument("--gpus", type=int, default=0, help="GPU workers, in their place")
    parser.add_argument("--gflop", type=float, help="1e9 operations of each case")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="the folder of the record")
    options = parser.parse_args()
    options.gflop = options.gflop or (GPU_GFLOP if options.gpus else GFLOP)
    found = []
    with cluster(options) as client:
        for case in CASES:
            if options.only in case.name:
                found.append(measured(client, case, options))
                print(f"{case.name}: {found[-1].seconds['multimm']:.3f} s", flush=True)
    print(*lines(found), sep="\n")
    if options.output:
        print(f"recorded in {recorded(found, options)}")
    # float32 sums of some thousand terms.
    return 1 if any(not one.error < 1e-3 for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
