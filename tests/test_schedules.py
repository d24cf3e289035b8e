"""Schedules of all kinds: every work item once, every tile one owner, and costs that are counted.

Costs are compared with the tasks of the graph, which are made of the same maps, and with the maps
themselves, item by item.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from math import prod

import dask.array as da
import numpy as np
from by_plan import by_plan
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from labels import block_tasks
from paper import gpus
from small import integers

from multimm.graph.tasks.multiply import Step
from multimm.planning.candidates.owner_computes import in_partial_products
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import communication, counted_transfers
from multimm.planning.options import Options
from multimm.planning.plan import Asked, MatmulPlan
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.spec import MatrixSpec
from multimm.planning.tiling.grid import Coordinate, Grid, ceil_div, even

M, K, N = 16, 12, 10
#: Batch dimensions of A and of B: none, its own each, one or the other or both broadcast.
BATCHES = [((), ())] * 4 + [((6,), (6,)), ((6,), ()), ((), (6,)), ((2, 1), (1, 3)), ((2, 3), (3,))]
GRIDS = st.sampled_from(
    [(1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 2, 1), (3, 2, 1), (4, 2, 1), (8, 1, 1), (2, 1, 2),
     (1, 1, 3), (2, 2, 2)]
).map(lambda grid: Grid(*grid))  # fmt: skip


@st.composite
def schedules(draw: st.DrawFn, known: bool = False) -> Schedule:
    """Plain products, stacks and symmetric products, in several row panels and parts of k."""
    grid, mirrors = draw(GRIDS), draw(st.booleans())
    of_a, of_b = draw(st.sampled_from(BATCHES))
    rows, columns, k_tiles = (draw(st.integers(1, 5)) for _ in range(3))
    assume(k_tiles >= grid.p_k)
    a = MatrixSpec((*of_a, M, K))
    b = a.T if mirrors else MatrixSpec((*of_b, K, N))
    m_blocks = even(M, rows)
    n_blocks = m_blocks if mirrors else even(N, columns)
    problem = Problem(a, b, symmetric=mirrors)
    batch = tuple(even(size, size) for size in problem.batch_shape)
    band = draw(st.integers(1, ceil_div(prod(map(len, batch)) * rows, grid.p_m)))
    schedule = Schedule(problem, grid, batch, m_blocks, n_blocks, even(K, k_tiles), band,
                        mirrors=mirrors)  # fmt: skip
    if not known:
        return schedule
    specs = []
    for role, spec in zip(schedule.roles, (a, b), strict=False):
        chunks = schedule.operand_chunks(role)
        lies = st.integers(0, grid.workers - 1)
        count = prod(map(len, chunks))
        owners = draw(st.lists(lies, min_size=count, max_size=count))
        specs.append(MatrixSpec(spec.shape, chunks=chunks, owners=tuple(owners)))
    a, b = (specs[0], specs[0].T) if mirrors else specs
    problem = Problem(a, b, symmetric=mirrors)
    return replace(schedule, problem=problem)


def cells(schedule: Schedule) -> list[tuple[int, int]]:
    """Row, over all matrices, and column of what is computed."""
    matrices = range(len(schedule.batch_sizes))
    return [(schedule.row(flat, i), j) for flat, (i, j) in product(matrices, schedule.work.pairs)]


def place(schedule: Schedule, row: int, j: int) -> tuple[int, int]:
    at = schedule.worker(row, j, 0)
    return at.row % schedule.grid.p_m, at.col % schedule.grid.p_n


def size(schedule: Schedule, row: int, j: int) -> int:
    return schedule.row_sizes[row] * schedule.n_blocks[j]


# Maps -----------------------------------------------------------------------------------


@given(schedules())
def test_every_work_item_is_in_one_row_panel_of_the_place_that_does_it(schedule):
    found, places = Counter(), [*product(range(schedule.grid.p_m), range(schedule.grid.p_n))]
    for row_panel in range(schedule.row_panels):
        busy = {schedule.work.stand_in(row_panel, at) for at in places}
        for at in busy:
            items = [*schedule.work.behind(row_panel, at)]
            assert items
            assert {place(schedule, *item) for item in items} == {at}
            assert {schedule.row_panel(row) for row, _ in items} == {row_panel}
            found.update(items)
    assert found == Counter(cells(schedule))


@given(st.booleans().flatmap(lambda known: schedules(known=known)))
def test_every_tile_has_one_owner_that_uses_it_unless_it_lies_elsewhere(schedule):
    edges = {"a": schedule.m_blocks, "b": schedule.n_blocks}
    for role in schedule.roles:
        for share, block in product(schedule.shares(role), range(len(edges[role]))):
            flat = share.users[0]
            owners = schedule.tiles.owners(role, flat, block)
            assert len(owners) == len(schedule.k_tiles)
            users = set().union(*schedule.work.users(role, flat, block))
            for k_tile, rank in enumerate(owners):
                owner = schedule.tiles.owner(role, flat, block, k_tile)
                assert schedule.grid.rank(owner) == rank < schedule.grid.workers
                if role not in schedule.operands.in_place and users:
                    assert owner.part == schedule.part_of[k_tile]
                    if len(schedule.row_sizes) >= schedule.grid.p_m and (
                        len(schedule.n_blocks) >= schedule.grid.p_n
                    ):
                        assert (owner.row, owner.col) in users


@given(schedules())
def test_the_busiest_is_the_busiest_of_the_map(schedule):
    sums, in_row_panel = Counter(), Counter()
    for row, j in cells(schedule):
        at = place(schedule, row, j)
        sums[at] += size(schedule, row, j)
        in_row_panel[schedule.row_panel(row), at] += size(schedule, row, j)
    work = schedule.work
    most, of_row_panel = max(sums.values()), max(in_row_panel.values())
    if schedule.mirrors:
        assert (work.most_summed, work.most_in_row_panel) == (most, of_row_panel)
        assert work.computed <= sum(sums.values())
    else:  # most rows and most columns need not be in the same row panels
        assert most == work.most_summed
        assert of_row_panel <= work.most_in_row_panel <= most
        assert work.computed == sum(sums.values()) == schedule.flops // (2 * K)
    assert work.multiplied(K) * schedule.grid.p_m * schedule.grid.p_n >= work.computed * K


# Costs ----------------------------------------------------------------------------------


def graph_of(schedule: Schedule, a: da.Array, b: da.Array) -> da.Array:
    asked = Asked(schedule.problem, Options(), plan_matmul)
    plan = MatmulPlan(schedule, gpus(schedule.grid.workers), "float32", "", "", asked)
    step = Step("float32", "float32", trans_b=schedule.mirrors)
    return by_plan(plan, a, b, step=step)


def operands(schedule: Schedule) -> list[da.Array]:
    """Small integers in the blocks of a schedule; of a symmetric product A alone, on both sides."""
    specs = zip("ab", (schedule.problem.a, schedule.problem.b), strict=True)
    made = [
        da.from_array(integers(spec.shape, seed), chunks=schedule.operand_chunks(role))
        for seed, (role, spec) in enumerate(specs)
        if role in schedule.roles
    ]
    return (2 * made)[:2] if schedule.mirrors else made


def from_tasks(schedule: Schedule, lazy: da.Array, arrays: list[da.Array]) -> tuple[Counter, dict]:
    """Bytes that each rank receives, and those of operands that it keeps, by array."""
    tasks = block_tasks(lazy)
    nbytes = {
        (x.name, *at): 4 * prod(sizes[i] for sizes, i in zip(x.chunks, at, strict=True))
        for x in arrays
        for at in np.ndindex(x.numblocks)
    }
    received, kept, sent = Counter(), defaultdict(Counter), set()
    owners = {}
    for task in tasks.values():
        here, row_panel = schedule.grid.rank(task.place.owner), task.place.order[0]
        for key, at in task.place.blocks:
            owners[key] = owner = schedule.grid.rank(at)
            if owner != here and (key, here, row_panel) not in sent:
                sent.add((key, here, row_panel))
                received[here] += nbytes[key]
        for key in task.dependencies & tasks.keys():
            before = tasks[key]
            if task.func.__name__.startswith("add") and before.place.owner != task.place.owner:
                *_, row, j = task.place.order
                received[here] += 4 * size(schedule, row, j)
    for key, owner in owners.items():
        kept[key[0]][owner] += nbytes[key]
    return received, kept


@settings(max_examples=60, deadline=None)
@given(st.booleans().flatmap(lambda known: schedules(known=known)))
def test_bytes_tasks_and_result_are_those_of_the_graph(schedule):
    a, b = operands(schedule)
    lazy = graph_of(schedule, a, b)
    received, kept = from_tasks(schedule, lazy, [a, b])
    cutting, _ = schedule.result.handing_out(schedule.grid.workers)
    assert len(block_tasks(lazy)) == schedule.tasks + cutting
    assert counted_transfers.received(schedule, schedule.grid.workers) == received
    for role, x in zip(schedule.roles, (a, b), strict=False):
        assert max(kept[x.name].values()) <= schedule.operands.kept[role]
    x, y = a.compute(), b.compute()
    expected = x @ (x.swapaxes(-1, -2) if schedule.mirrors else y)
    np.testing.assert_array_equal(lazy.compute(scheduler="sync"), expected)


@given(schedules())
def test_of_more_tasks_than_are_counted_the_closed_form_says_what_moves(schedule):
    assume(not schedule.mirrors)
    counted = communication.of_products(schedule, schedule.grid.workers)
    moved = communication.of_products(schedule, schedule.grid.workers, most=0)
    assert moved.busiest <= moved.total
    if schedule.row_panels == 1 and not schedule.batch_blocks:
        rows, columns = len(schedule.m_blocks), len(schedule.n_blocks)
        if rows >= schedule.grid.p_m and columns >= schedule.grid.p_n:
            assert moved.total == counted.total


@given(schedules())
def test_the_panels_of_a_row_panel_hold_what_its_items_need(schedule):
    needed = Counter()
    share_of = {
        role: {flat: share for share in schedule.shares(role) for flat in share.users}
        for role in schedule.roles
    }
    seen = set()
    for row, j in cells(schedule):
        (flat, i), at = divmod(row, len(schedule.m_blocks)), place(schedule, row, j)
        other = "a" if schedule.mirrors else "b"
        sides = ("a", i, schedule.m_blocks), (other, j, schedule.n_blocks)
        for role, block, edges in sides:
            share = share_of[role][flat]
            tile = role, at, schedule.row_panel(row), share.users[0], block
            if tile not in seen:
                seen.add(tile)
                needed[tile[:3]] += share.matrices * edges[block]
    for role, panel in zip(schedule.roles, schedule.work.panels, strict=False):
        assert max(size for (whose, *_), size in needed.items() if whose == role) <= panel


# Where one operand is multiplied where it lies: products and partial products are in
# `test_partial_products` --


@st.composite
def owner_computes(draw: st.DrawFn) -> Schedule:
    """A tall or a wide matrix in chunks of two dimensions that lie anywhere."""
    workers, by_columns = draw(st.integers(2, 4)), draw(st.booleans())
    rows = tuple(draw(st.lists(st.integers(1, 9), min_size=8, max_size=20)))
    columns = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    count = len(rows) * len(columns)
    lies = st.integers(0, workers - 1)
    owners = tuple(draw(st.lists(lies, min_size=count, max_size=count)))
    tall = MatrixSpec((sum(rows), sum(columns)), chunks=(rows, columns), owners=owners)
    small = MatrixSpec((sum(columns), 3))
    problem = Problem(small.T, tall.T) if by_columns else Problem(tall, small)
    found = list(in_partial_products(problem, gpus(workers)))
    assume(found)
    return draw(st.sampled_from(found))


@given(owner_computes())
def test_each_block_of_c_is_joined_by_a_worker_that_has_some_of_it(schedule):
    work, grid = schedule.work, schedule.grid
    rows, columns = (range(len(blocks)) for blocks in work.sides)
    for row, j in product(rows, columns):
        partial_product = work.cell(row, j)
        assert partial_product in work.pairs
        at = Coordinate(*work.worker(*partial_product), 0)
        assert schedule.completes(row, j) == grid.rank(at)
    counted = counted_transfers.received(schedule, grid.workers)
    moved = communication.of_products(schedule, grid.workers)
    assert moved == (sum(counted.values()), max(counted.values(), default=0))
