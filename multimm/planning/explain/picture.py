"""A plan for notebooks: who has which block, what memory and time are made of, and the text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from multimm.display import html
from multimm.display.units import duration, flops, human
from multimm.planning.explain import text
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import Blocks

if TYPE_CHECKING:
    from multimm.planning.plan import MatmulPlan

#: Blocks along a side of a matrix that are drawn, and pixels of the longest and shortest side.
MOST, LONGEST, SHORTEST = 12, 180, 30
GAP, LETTER = 14, 14  # between matrices, and the height of a letter
#: Of so many blocks at most each has its worker's number in it.
NUMBERED = 36


class Matrix(NamedTuple):
    """What is drawn of A, B or C: blocks along both sides, and who has each."""

    name: str
    rows: Blocks
    columns: Blocks
    owner: Callable[[int, int], int | None]


def page(plan: MatmulPlan) -> str:
    """All of it, below the sentence that the text begins with."""
    budget = plan.budget_bytes
    stay = [(name, size, human(size)) for name, size in text.named(plan.memory_terms)]
    spill = [(f"{name} (may be spilled)", size, human(size))
             for name, size in text.named(plan.spill_terms)]  # fmt: skip
    rate = f"{flops(plan.flops / max(plan.seconds, 1e-12))}/s"
    bars = [
        html.bar(
            f"Memory of the fullest worker: {human(plan.peak_bytes)} of {human(budget)}",
            [*stay, *spill],
            budget,
        )
    ]
    for phases, title in (
        (("one after another", "before and after"), f"Time: {duration(plan.seconds)}, {rate}"),
        (("meanwhile",), "at the same time"),
    ):
        parts = [
            (name, seconds, duration(seconds))
            for phase, named in text.phases(plan)
            if phase in phases
            for name, seconds in named
        ]
        bars += [html.bar(title, parts, plan.seconds)] if parts else []
    return html.page(
        text.summary(plan), picture(plan), *bars, html.folded("All figures", text.text(plan))
    )


def picture(plan: MatmulPlan) -> str:
    """A beside C and B above it, each block in the colour of the worker that keeps or makes it."""
    a, b, c = matrices(plan)
    sizes = [sum(side) for side in (c.rows, c.columns, a.columns)]
    high, wide, deep = (_pixels(size, max(sizes)) for size in sizes)
    left, top = deep + GAP, deep + GAP + LETTER
    across, down = left + wide + 1, top + high + 1
    drawn = [
        _drawn(a, 0, top, deep, high),
        _drawn(b, left, LETTER, wide, deep),
        _drawn(c, left, top, wide, high),
    ]
    many = [f"{x.name} in {len(x.rows)} x {len(x.columns)}" for x in (a, b, c)]
    first = any(max(len(x.rows), len(x.columns)) > MOST for x in (a, b, c))
    said = f"{', '.join(many)} blocks; " + (
        "Dask decides on workers." if plan.layout.queued else "each colour is a worker."
    )
    said += f" The first {MOST} of each side are drawn." if first else ""
    said += " Of a stack, the first matrices." if plan.layout.batch_blocks else ""
    return (
        f'<div><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" '
        f'style="width:{across}px;max-width:100%" role="img" font-size="10" fill="currentColor">'
        f"<title>{html.escaped(said)}</title>{''.join(drawn)}</svg><br>"
        f"<small>{html.escaped(said)}</small></div>"
    )


def _pixels(size: int, longest: int) -> int:
    return max(SHORTEST, round(LONGEST * size / max(1, longest)))


def matrices(plan: MatmulPlan) -> tuple[Matrix, Matrix, Matrix]:
    """What is drawn of a plan."""
    layout, workers = plan.layout, plan.used.workers

    def number(rank: int) -> int | None:
        return None if layout.queued else plan.cluster.number(rank % workers)

    rows, columns = layout.result.blocks[-2:]
    c = Matrix("C", rows, columns, lambda i, j: number(layout.completes(i, j)))
    return _operand("a", layout, number), _operand("b", layout, number), c


def _operand(role: str, layout: Schedule, number: Callable[[int], int | None]) -> Matrix:
    own, name = layout.in_place, role.upper()
    if own is not None:  # in chunks, as they come
        spec = layout.spec(role)
        rows, columns = spec.chunks[-2:]
        small, width = role == own.small, len(columns)

        def of_chunk(i: int, j: int) -> int | None:
            at = i * width + j
            if small:
                return number(own.owner_of_small(at))
            return number(spec.owners[at]) if spec.owners else None

        return Matrix(name, rows, columns, of_chunk)
    tiles, k_tiles, grid = layout.tiles, layout.k_tiles, layout.grid

    def of_block(block: int, k_tile: int) -> int | None:
        known = role if role in layout.roles else "a"  # of a symmetric product B is A
        return number(grid.rank(tiles.owner(known, 0, block, k_tile)))

    if role == "a":
        return Matrix(name, layout.m_blocks, k_tiles, of_block)
    return Matrix(name, k_tiles, layout.n_blocks, lambda s, j: of_block(j, s))


def _drawn(matrix: Matrix, x: int, y: int, width: int, height: int) -> str:
    """One path for all blocks of a worker, numbers where there is room, and the name."""
    paths: dict[int | None, list[str]] = defaultdict(list)
    numbers = []
    few = len(matrix.rows) * len(matrix.columns) <= NUMBERED
    for i, (top, high) in enumerate(_edges(matrix.rows, height)):
        for j, (left, wide) in enumerate(_edges(matrix.columns, width)):
            owner = matrix.owner(i, j)
            paths[owner].append(f"M{x + left} {y + top}h{wide}v{high}h-{wide}z")
            if few and owner is not None and min(wide, high) >= 12:
                numbers.append(
                    f'<text x="{x + left + wide / 2:g}" y="{y + top + high / 2 + 3.5:g}" '
                    f'text-anchor="middle" fill="#000">{owner}</text>'
                )
    made = (
        f'<path d="{"".join(cells)}" fill="{"none" if at is None else html.colour(at)}" '
        'stroke="currentColor" stroke-opacity=".4" stroke-width=".5"/>'
        for at, cells in paths.items()
    )
    name = f'<text x="{x + 1}" y="{y - 3}">{matrix.name}</text>'
    return "".join((*made, *numbers, name))


def _edges(blocks: Blocks, pixels: int) -> Iterator[tuple[int, int]]:
    """Where the first blocks begin in the picture, and how long they are; each is seen."""
    shown = blocks[:MOST]
    total, at = max(1, sum(shown)), 0
    for size in shown:
        start, at = at, at + size
        left = round(pixels * start / total)
        yield left, max(1, round(pixels * at / total) - left)
