"""The least bytes that contractions on two workers have to move, as their chunks lie, beside ours.

    python -m multimm_benchmarks.least_bytes [--only WORD]

For each case of `multimm_benchmarks.contractions`: bytes that multimm and Dask move between two CPU
workers, and the least that any assignment of block products to them can, by an integer program:

    who multiplies each pair of chunks; where intermediate blocks are kept
    a chunk travels if a worker without it multiplies it; a block of sums, if both have summed it

Once for any assignment, and once for those in which no worker has more than 0.6 of a step's
operations. Steps of three operands follow opt_einsum's path. Where chunks lie is Dask's choice when
it makes the operands, another one in each run, and for Dask's own product yet another.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from distributed import Client, futures_of, wait
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

import multimm
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm_benchmarks.contractions import (
    CASES,
    GFLOP,
    LARGEST,
    Case,
    _until_gone,
    operands,
    resized,
)

#: Share of a step's operations by which a worker may have more than half of them: arbitrary.
UNEVEN = 0.1
#: Seconds for a program, and how far from its optimum it may end.
SECONDS, GAP = 30, 0.005

Index = tuple[int, ...]


class Blocks(NamedTuple):
    """A tensor in blocks on two workers, numbered 0 and 1."""

    labels: str
    sizes: Mapping[str, Index]  #: along each label
    where: Mapping[Index, int]  #: worker of each block; of an intermediate one the variable of it
    lies: bool  #: it is an operand

    def nbytes(self, at: Index, itemsize: int) -> int:
        return itemsize * math.prod(self.sizes[x][n] for x, n in zip(self.labels, at, strict=True))


class Program:
    """A sum of costs of binary variables, and inequalities between these."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def variable(self, cost: float = 0) -> int:
        """A new one."""
        self.costs.append(cost)
        return len(self.costs) - 1

    def between(self, least: float, terms: dict[int, float], most: float) -> None:
        """A condition."""
        self.rows.append((terms, least, most))

    def differs(self, cost: float, products: Iterable[int], at: int, *, fixed: bool) -> None:
        """So much is paid if one of the products is not computed at a worker, or a variable one."""
        paid = self.variable(cost)
        for one in products:
            if not fixed:
                self.between(-np.inf, {one: 1, at: -1, paid: -1}, 0)
                self.between(-np.inf, {one: -1, at: 1, paid: -1}, 0)
            else:
                sign = 1 - 2 * at
                self.between(-np.inf, {one: sign, paid: -1}, -at)

    def least(self) -> float:
        """The least sum."""
        matrix = lil_matrix((len(self.rows), len(self.costs)))
        for row, (terms, _, _) in enumerate(self.rows):
            for column, factor in terms.items():
                matrix[row, column] = factor
        limits = LinearConstraint(
            matrix.tocsr(), *zip(*(row[1:] for row in self.rows), strict=True)
        )
        return float(
            milp(
                np.array(self.costs), constraints=limits, integrality=np.ones(len(self.costs)),
                bounds=Bounds(0, 1), options={"time_limit": SECONDS, "mip_rel_gap": GAP},
            ).fun
        )  # fmt: skip


def least(
    subscripts: str, given: list[Blocks], path: Iterable[Index], uneven: float, itemsize: int = 4
) -> float:
    """Bytes that have to travel, if no worker has more than a half and `uneven` of a step."""
    program, tensors, out = Program(), list(given), subscripts.partition("->")[2]
    steps = [*path]
    used: dict[tuple[int, Index], list[int]] = defaultdict(list)  # of operands: by all steps
    for step, pair in enumerate(steps):
        b, a = (tensors.pop(n) for n in sorted(pair, reverse=True))
        rest = {*out, *(x for tensor in tensors for x in tensor.labels)}
        labels = list(dict.fromkeys(a.labels + b.labels))
        grid = {x: _common(t.sizes[x] for t in (a, b) if x in t.sizes) for x in labels}
        kept = [*out] if step == len(steps) - 1 else [x for x in labels if x in rest]
        uses: dict[tuple[int, Index], list[int]] = defaultdict(list)
        made: dict[Index, list[int]] = defaultdict(list)
        load: dict[int, float] = {}
        for numbers in product(*(range(len(grid[x])) for x in labels)):
            at = dict(zip(labels, numbers, strict=True))
            one = program.variable()
            load[one] = math.prod(grid[x][at[x]] for x in labels)
            for n, tensor in enumerate((a, b)):
                block = tuple(_holding(tensor.sizes[x], grid[x], at[x]) for x in tensor.labels)
                uses[n, block].append(one)
            made[tuple(at[x] for x in kept)].append(one)
        for (n, block), products in uses.items():
            tensor = (a, b)[n]
            if tensor.lies:
                used[id(tensor.where), block] += products  # one array on both sides: once
            else:
                program.differs(
                    tensor.nbytes(block, itemsize), products, tensor.where[block], fixed=False
                )
        sums = Blocks("".join(kept), {x: grid[x] for x in kept}, {}, lies=False)
        where = {}
        for block, products in made.items():
            where[block] = program.variable()
            size = float(sums.nbytes(block, itemsize)) if len(products) > 1 else 1e15
            program.differs(size, products, where[block], fixed=False)
        tensors.append(sums._replace(where=where))
        if uneven:
            total = sum(load.values())
            room = max(uneven, max(load.values()) / total / 2 + 1e-9)
            shares = {one: n / total for one, n in load.items()}
            program.between(0.5 - room, shares, 0.5 + room)
    for tensor in {id(x.where): x for x in given}.values():
        for block, worker in tensor.where.items():
            products = used[id(tensor.where), block]
            program.differs(tensor.nbytes(block, itemsize), products, worker, fixed=True)
    return program.least()


def _common(sizes: Iterable[Index]) -> Index:
    """The spans between all boundaries."""
    ends = sorted({0, *(end for one in sizes for end in accumulate(one))})
    return tuple(end - start for start, end in pairwise(ends))


def _holding(sizes: Index, spans: Index, number: int) -> int:
    """The block that has a span."""
    end = [*accumulate(spans)][number]
    return next(n for n, last in enumerate(accumulate(sizes)) if end <= last)


def lying(client: Client, case: Case, given: list[da.Array]) -> list[Blocks]:
    """Operands, and which of the two workers has each chunk."""
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
    held = {str(key): at[0] for key, at in client.who_has(futures_of(given)).items()}
    where: dict[str, dict[Index, int]] = {}
    for x in given:
        keys = {tuple(future.key[1:]): held[str(future.key)] for future in futures_of(x)}
        where[x.name] = {at: workers.index(address) for at, address in keys.items()}
    terms = case.subscripts.partition("->")[0].split(",")
    return [
        Blocks(own, dict(zip(own, x.chunks, strict=True)), where[x.name], lies=True)
        for own, x in zip(terms, given, strict=True)
    ]


def path_of(case: Case, sizes: Mapping[str, int]) -> list[Index]:
    """Which operands each step takes."""
    terms = case.subscripts.partition("->")[0].split(",")
    if len(terms) == 2:
        return [(0, 1)]
    import opt_einsum  # type: ignore[import-untyped]

    shapes = [tuple(sizes[x] for x in own) for own in terms]
    found: list[Index] = opt_einsum.contract_path(case.subscripts, *shapes, shapes=True)[0]
    return found


def moved(
    client: Client, case: Case, sizes: dict[str, int], einsum: Any
) -> tuple[int, list[Blocks]]:
    """Bytes that travel for operands that are made anew, and where these lay."""
    _until_gone(client)
    given = operands(case, sizes, cupy=False)
    lay = lying(client, case, given)
    reset_received_bytes(client)
    wait(einsum(case.subscripts, *given).persist())
    return sum(received_bytes(client).values()), lay


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this word")
    options = parser.parse_args()
    print(
        f"{'MB moved':24s}{'multimm':>9s}{'least':>9s}{'balanced':>9s}{'dask':>9s}{'balanced':>9s}"
    )
    total = np.zeros(5)
    with multimm.cluster.start(workers=2, memory_limit="3GB") as client:
        for case in CASES:
            if options.only in case.name:
                sizes = resized(case, GFLOP, LARGEST)
                path = path_of(case, sizes)
                ours, lay = moved(client, case, sizes, multimm.einsum)
                theirs, lay_there = moved(client, case, sizes, da.einsum)
                own = [least(case.subscripts, lay, path, uneven) for uneven in (0, UNEVEN)]
                there = least(case.subscripts, lay_there, path, UNEVEN)
                row = np.array([ours, *own, theirs, there]) / 1e6
                total += row
                print(f"{case.name:24s}" + "".join(f"{x:9.1f}" for x in row), flush=True)
    print(f"{'all':24s}" + "".join(f"{x:9.1f}" for x in total))


if __name__ == "__main__":
    main()
