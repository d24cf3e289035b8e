"""Golden plans: problems in plain values, and what a user sees of the plan of each.

`golden/plans.jsonl` has one problem a line, over 1 to 8 workers:

    {"on": "4 cpu, 1 GB", "a": "20000x512 in 500x512 at bands", "b": "512x512"}

`on` is workers and device (`DEVICES`), then, where it is not the device's own, memory, threads, or
workers per node; ``process`` is this process, with so many threads. An operand is a shape, and what
is not usual about it: ``as`` a dtype, ``in`` chunks, ``at`` workers (`workers_of`), ``from`` a
file, from tasks that are still to run, or from host memory. Chunks are one edge for each dimension,
sizes joined by ``+``, or ``~9`` for nine uneven ones. Where `b` is ``a`` it is the same matrix. All
other entries are arguments of `multimm.plan`.

    python tests/golden_plans.py              compares today's plans with the file's
    python tests/golden_plans.py --rewrite    and writes them to it: a new problem needs no plan
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from math import exp, log, prod
from pathlib import Path
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.utils import parse_bytes

import multimm
from multimm.errors import MemoryBudgetError
from multimm.io import open_array
from multimm.planning.devices import SHARED_MEMORY
from multimm.planning.plan import MatmulPlan
from multimm.planning.spec import H200, LOCAL_TCP, NVLINK, ClusterSpec, DeviceSpec, MatrixSpec

FILE = Path(__file__).parent / "golden" / "plans.jsonl"
GB = 10**9
DEVICES = {
    "cpu": (DeviceSpec("CPU", "cpu", 4 * GB, 30.0, 10.0, process_bytes=110_000_000), LOCAL_TCP),
    "H200": (H200, NVLINK),
    "H100": (DeviceSpec("H100", "gpu", 85 * GB, 51e3, 2600.0, packs=("float32", "tf32")), NVLINK),
    "T4": (DeviceSpec("T4", "gpu", 16 * GB, 6.5e3, 270.0), LOCAL_TCP),
    "process": (DeviceSpec("CPU", "cpu", 16 * GB, 30.0, 10.0, spills=False), SHARED_MEMORY),
}
#: A plan is worse that takes this much longer: what differs by less is the same.
SLOWER = 1.001
#: What is compared, and from which ratio on it is worse.
MEASURES = {"seconds": SLOWER, "bytes": 1.0, "memory": 1.0}

Golden = dict[str, Any]


def cluster_of(text: str) -> ClusterSpec:
    """Workers on paper."""
    head, *more = text.split(", ")
    count, name = head.split()
    device, link = DEVICES[name]
    given = dict(reversed(word.split(maxsplit=1)) for word in more)
    memory = [word for word in more if word.endswith("B")]
    if memory:
        device = replace(device, memory_bytes=parse_bytes(memory[0]))
    threads = int(given.get("threads", 1))
    if name == "process":  # one worker, as `multimm.cluster.local` describes it
        device = replace(device, gflops=device.gflops * int(count))
        return ClusterSpec((device,), link, threads=int(count), task_overhead_s=1e-4, call_s=2e-3)
    cluster = ClusterSpec.homogeneous(device, int(count), link, threads)
    return replace(cluster, per_node=int(given.get("per node", 0)))


def chunks_of(text: str, size: int) -> tuple[int, ...]:
    """Chunks along one dimension."""
    if text.startswith("~"):
        weights = [2 + 7 * i % 5 for i in range(int(text[1:]))]
        ends = [size * sum(weights[:i]) // sum(weights) for i in range(len(weights) + 1)]
        return tuple(end - start for start, end in pairwise(ends))
    if "+" in text:
        return tuple(map(int, text.split("+")))
    edge = max(1, int(text))
    return tuple(min(edge, size - start) for start in range(0, size, edge)) or (0,)


def workers_of(name: str, counts: list[int], workers: int) -> tuple[int, ...]:
    """Which worker each chunk lies on, in C order."""
    rows, columns = counts[0], prod(counts[1:])
    blocks, scattered = rows * columns, [(i * 2654435761 >> 9) % 97 for i in range(rows * columns)]
    high = max(d for d in range(1, workers + 1) if workers % d == 0 and d * d <= workers)
    wide = workers // high
    found = {
        "turn": [i % workers for i in range(blocks)],  # as Dask makes them
        "next": [(i + 1) % workers for i in range(blocks)],  # that begins with another worker
        "bands": [i * workers // blocks for i in range(blocks)],  # neighbours together
        "columns": [i % columns % workers for i in range(blocks)],
        "grid": [i // columns % high * wide + i % columns % wide for i in range(blocks)],
        "random": [i % workers for i in scattered],
        "uneven": [0 if i % 2 else i % workers for i in scattered],
        "one": [workers - 1] * blocks,
    }
    return tuple(found[name])


def operand(text: str, workers: int, folder: Path) -> Any:
    """A MatrixSpec, or a lazy array whose blocks come from a file or from tasks."""
    shape_text, *words = text.split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    shape = tuple(map(int, shape_text.split("x")))
    dtype, source = given.get("as", "float32"), given.get("from", "")
    edges = given["in"].split("x") if "in" in given else list(map(str, shape))
    chunks = tuple(chunks_of(edge, size) for edge, size in zip(edges, shape, strict=True))
    if source == "file":
        path = folder / f"{shape_text}-{dtype}.npy"
        if not path.exists():
            np.lib.format.open_memmap(path, "w+", dtype, shape)  # sparse: takes no room
        return open_array(path, chunks=chunks)
    if source == "tasks":
        return da.zeros(shape, chunks=chunks, dtype=dtype).map_blocks(np.negative)
    owners = workers_of(given["at"], list(map(len, chunks)), workers) if "at" in given else ()
    chunks = chunks if "in" in given else ()
    return MatrixSpec(shape, dtype, chunks=chunks, owners=owners, hosted=source == "host")


def plan_of(problem: Golden, folder: Path) -> MatmulPlan:
    """The plan, unless it is refused."""
    arguments = dict(problem)
    cluster = cluster_of(arguments.pop("on"))
    a, b, c = (arguments.pop(role, None) for role in "abc")
    x = operand(a, cluster.workers, folder)
    y = x if b == "a" else operand(b, cluster.workers, folder)
    z = None if c is None else operand(c, cluster.workers, folder)
    if isinstance(blocks := arguments.get("blocks"), list):
        arguments["blocks"] = tuple(blocks)
    return multimm.plan(x, y, c=z, cluster=cluster, **arguments)


def planned(problem: Golden, folder: Path) -> Golden:
    """What a user sees of the plan."""
    try:
        plan = plan_of(problem, folder)
    except MemoryBudgetError:
        return {"refused": True}
    if not plan.fits:
        return {"refused": True}
    return {
        "seconds": float(f"{plan.seconds:.6g}"),
        "bytes": plan.bytes_moved,
        "memory": plan.peak_bytes,
        "tasks": plan.tasks,
        "grid": "x".join(map(str, plan.grid)),
        "chunks": " ".join(f"{len(sizes)}*{max(sizes)}" for sizes in plan.chunks),
    }


class Change(NamedTuple):
    """What became of one plan: ratios of new to old, by measure."""

    problem: Golden
    old: Golden
    new: Golden

    @property
    def ratios(self) -> dict[str, float]:
        """New to old; what is refused in one of them only is infinitely worse, or better."""
        refused = bool(self.new.get("refused")), bool(self.old.get("refused"))
        if any(refused):
            ratio = 1.0 if all(refused) else float("inf") if refused[0] else 0.0
            return dict.fromkeys(MEASURES, ratio)
        pairs = {name: (self.new[name], self.old[name]) for name in MEASURES}
        return {
            name: new / old if old else float("inf") if new else 1.0
            for name, (new, old) in pairs.items()
        }

    @property
    def worse(self) -> bool:
        """Whether a user is worse off in some way, a refusal that is gone included."""
        ratios = self.ratios
        stays = self.new.get("refused") == self.old.get("refused")
        return not stays or any(ratios[name] > limit for name, limit in MEASURES.items())

    @property
    def seen(self) -> bool:
        """Whether anything else is planned, or predicted by more than rounding."""
        close = 1 / SLOWER < self.ratios["seconds"] < SLOWER
        return not close or {**self.new, "seconds": 0} != {**self.old, "seconds": 0}

    def __str__(self) -> str:
        shown = [
            f"{name} {self.old.get(name, 'refused')} -> {self.new.get(name, 'refused')}"
            for name in (*MEASURES, "tasks", "grid", "chunks")
            if self.old.get(name) != self.new.get(name)
        ]
        return f"{json.dumps(self.problem)}\n    {', '.join(shown) or 'refused'}"


def read() -> list[tuple[Golden, Golden]]:
    """Problems, and their golden plans; of a new problem, an empty one."""
    lines = map(json.loads, FILE.read_text().splitlines())
    return [(line["problem"], line.get("plan", {})) for line in lines]


def compare() -> list[Change]:
    """Golden plans beside today's."""
    with tempfile.TemporaryDirectory() as folder:
        return [Change(of, old, planned(of, Path(folder))) for of, old in read()]


def summary(changes: list[Change]) -> str:
    """What got better or worse: how many, by how much, and the worst ten."""
    known = [change for change in changes if change.old]
    lines = [f"{len(known)} golden plans, {len(changes) - len(known)} new ones"]
    for name, limit in MEASURES.items():
        ratios = [change.ratios[name] for change in known]
        worse, better = sum(x > limit for x in ratios), sum(x < 1 / limit for x in ratios)
        finite = [x for x in ratios if 0 < x < float("inf")]
        mean = exp(sum(map(log, finite)) / max(1, len(finite)))
        lines.append(f"{name:<8} {worse} worse, {better} better, {mean:.4f} of before on average")
    worst = [change for change in known if change.worse]
    worst.sort(key=lambda change: max(change.ratios.values()), reverse=True)
    lines += [f"{len(worst)} plans worse; the worst:"] * bool(worst)
    return "\n".join((*lines, *map(str, worst[:10])))


def rewrite(changes: list[Change]) -> None:
    """Write today's plans to the file."""
    lines = ({"problem": change.problem, "plan": change.new} for change in changes)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    FILE.write_text(text)


def main(arguments: list[str]) -> int:
    """From the command line; the status is 1 where a plan is worse and the file stays as it is."""
    if set(arguments) - {"--rewrite"}:
        print(__doc__)
        return 2
    changes = compare()
    print(summary(changes))
    if arguments:
        rewrite(changes)
        print(f"written to {FILE}")
        return 0
    return int(any(change.worse for change in changes if change.old))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
