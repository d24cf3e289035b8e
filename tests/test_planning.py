"""Plans are values: every number here is worked out by hand or counted a second way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from multimm.cluster.start import RMM_POOL_SHARE
from multimm.errors import DTypeError, MemoryBudgetError, OptionError, ShapeError
from multimm.planning.choice import _drawback, plan_matmul
from multimm.planning.cost import communication, counted_transfers, memory, time
from multimm.planning.explain import blocks_text, human
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.search import Rank
from multimm.planning.spec import (
    H200,
    INFINIBAND,
    LOCAL_TCP,
    NVLINK,
    ClusterSpec,
    DeviceSpec,
    Link,
    MatrixSpec,
)
from multimm.planning.tiling import boundaries
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.counts import Cut
from multimm.planning.tiling.grid import (
    Coordinate,
    Grid,
    ceil_div,
    divisors,
    even,
    grids,
    group,
    largest_share,
    merges,
    parts_of,
    rearrange,
    regular,
    turns,
)

GB = 10**9
CPU = DeviceSpec("cpu", "cpu", 2 * GB, 50.0, 20.0)
H200X8 = ClusterSpec.homogeneous(H200, 8)


def square(size: int, **options: bool) -> Problem:
    return problem(size, size, size, **options)


def problem(m: int, k: int, n: int, rereadable: bool = False) -> Problem:
    return Problem(MatrixSpec((m, k)), MatrixSpec((k, n)), rereadable=(rereadable, rereadable))


def cpus(workers: int, memory: int = 2 * GB) -> ClusterSpec:
    device = DeviceSpec("cpu", "cpu", memory, 50.0, 20.0)
    return ClusterSpec.homogeneous(device, workers, LOCAL_TCP)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_even_blocks_add_up_and_differ_by_one(size, count):
    blocks = even(size, count)
    assert sum(blocks) == size
    assert max(blocks) - min(blocks) <= 1
    assert len(blocks) == max(1, min(count, size))


@given(st.integers(0, 1000), st.integers(1, 50))
def test_regular_blocks_add_up(size, block):
    blocks = regular(size, block)
    assert sum(blocks) == size
    assert all(each == block for each in blocks[:-1])
    assert 0 <= blocks[-1] <= block


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 40))
def test_group_joins_neighbours_and_never_cuts(chunks, target):
    joined = group(tuple(chunks), target)
    ends = {sum(chunks[: i + 1]) for i in range(len(chunks))}
    assert sum(joined) == sum(chunks)
    assert {sum(joined[: i + 1]) for i in range(len(joined))} <= ends
    assert max(joined) <= target + 2 * max(chunks)
    assert 0 not in joined[1:]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_every_rank_has_one_coordinate(p_m, p_n, p_k):
    grid = Grid(p_m % 5 + 1, p_n % 5 + 1, p_k % 5 + 1)
    places = product(range(grid.p_m), range(grid.p_n), range(grid.p_k))
    ranks = [grid.rank(Coordinate(*place)) for place in places]
    assert sorted(ranks) == list(range(grid.workers))


def test_no_worker_is_asked_for_everything_in_one_step():
    """In each step of an 8x8-block product on 4x4 workers, all 16 keep two of the 32 blocks."""
    grid, sizes = Grid(4, 4, 1), even(80, 8)
    layout = Schedule(problem(80, 80, 80), grid, (), sizes, sizes, sizes, band=2)
    for k_tile in range(8):
        asked = Counter(layout.tiles.owners("a", 0, i)[k_tile] for i in range(8))
        assert max(asked.values()) == 1
        asked.update(layout.tiles.owners("b", 0, j)[k_tile] for j in range(8))
        assert max(asked.values()) <= 2


@pytest.mark.parametrize("parts", range(1, 34))
@pytest.mark.parametrize("fan_in", [2, 4, 8, 16])
def test_owners_of_sums_repeat_after_as_many_turns_as_are_said(parts, fan_in):
    count = turns(parts, fan_in)
    found = [merges(parts, turn, fan_in) for turn in range(3 * count)]
    assert found == found[:count] * 3
    sooner = [d for d in divisors(count) if d < count and found[d:] == found[:-d]]
    assert not sooner


def pairwise_sum(addends: list[str]) -> str:
    """As `add_partials` adds."""
    while len(addends) > 1:
        pairs = [f"({x}+{y})" for x, y in zip(addends[::2], addends[1::2], strict=False)]
        addends = [*pairs, *addends[2 * len(pairs) :]]
    return addends[0]


@given(st.integers(1, 40), st.integers(0, 100), st.sampled_from([2, 4, 8, 16]))
def test_merges_add_every_part_once_whoever_keeps_the_sums_and_however_many_at_once(
    parts, turn, fan_in
):
    sums = {part: str(part) for part in range(parts)}
    owners = dict(enumerate(range(parts)))
    for merge in merges(parts, turn, fan_in):
        assert 2 <= len(merge.addends) <= fan_in
        assert sorted((merge.owner, *merge.senders)) == sorted(owners.pop(x) for x in merge.addends)
        owners[merge.addends[0]] = merge.owner
        sums[merge.addends[0]] = pairwise_sum([sums.pop(part) for part in merge.addends])
    assert sums == {0: pairwise_sum([str(part) for part in range(parts)])}


@pytest.mark.parametrize("fan_in", [2, 4])
def test_merges_spread_the_sums_over_the_parts(fan_in):
    last = Counter(merges(4, turn, fan_in)[-1].owner for turn in range(16))
    assert last == dict.fromkeys(range(4), 4)


def test_parts_are_contiguous_and_even():
    assert parts_of(7, 3) == (0, 0, 0, 1, 1, 2, 2)
    assert parts_of(2, 5) == (0, 1)


@pytest.mark.parametrize("workers", [1, 2, 3, 6, 8, 12, 1024])
def test_grids_are_all_arrangements(workers):
    found = list(grids(workers))
    assert len(set(found)) == len(found)
    assert all(grid.workers == workers for grid in found)
    assert Grid(1, workers, 1) in found
    assert Grid(1, 1, workers) in found


def test_grids_with_fixed_parts_leave_some_idle_or_wrap_around():
    assert list(grids(8, 3)) == [Grid(1, 2, 3), Grid(2, 1, 3)]
    assert list(grids(2, 5)) == [Grid(1, 1, 5)]


@pytest.mark.parametrize(
    ("grid", "workers", "expected"),
    [
        (Grid(2, 2, 1), 6, Grid(2, 3, 1)),
        (Grid(4, 2, 1), 6, Grid(3, 2, 1)),
        (Grid(2, 4, 1), 1, Grid(1, 1, 1)),
        (Grid(1, 1, 4), 2, Grid(1, 1, 4)),
        (Grid(1, 2, 4), 16, Grid(2, 2, 4)),
    ],
)
def test_rearrange_keeps_the_parts_of_k(grid, workers, expected):
    assert rearrange(grid, workers) == expected


def test_volume_is_the_closed_form():
    # |A| = 3*5*4, |B| = 5*7*4, |C| = 3*7*4 bytes; distinct primes, so that no term can hide
    shape = problem(3, 5, 7)
    assert communication.volume(shape, Grid(11, 13, 17)) == 60 * 12 + 140 * 10 + 84 * 16


def test_bound_is_the_best_plane():
    assert communication.bound_2d(square(100), 4) == 40_000 * 2
    assert communication.bound_2d(problem(1000, 10, 10), 4) == 3 * 400  # 4 x 1: only B travels


@example(2, 1, 3, 1, 1)
@example(3, 3, 4, 4, 2)
@given(st.integers(1, 4), st.integers(1, 4), *[st.integers(1, 9)] * 3)
def test_the_busiest_worker_receives_about_what_is_counted(p_m, p_n, rows, columns, k_tiles):
    """Exactly, where blocks are too few for all workers; and three on two are not shared evenly."""
    shape, grid = problem(60, 70, 80), Grid(p_m, p_n, 1)
    layout = Schedule(shape, grid, (), even(60, rows), even(80, columns), even(70, k_tiles), band=9)
    counted = counted_transfers.received(layout, grid.workers)
    most, moved = max(counted.values(), default=0), communication.of_products(layout, grid.workers)
    assert moved.total == sum(counted.values())
    if rows < p_m or columns < p_n:
        assert moved.busiest == most
    assert 0.7 * most <= moved.busiest <= 1.8 * most


def test_what_stays_at_owner_is_in_use_there_and_nowhere_else():
    def held(grid, **more):
        blocks = even(240, 4), even(360, 4), even(480, 4)
        layout = Schedule(problem(240, 480, 360), grid, (), *blocks, band=4 // grid.p_m, **more)
        stay, spill = memory.held(layout, cpus(grid.workers))
        return stay | spill

    column = held(Grid(2, 1, 1))  # A never travels
    assert column["A in use"] == 120 * 120 * 4
    assert column["A in use"] + column["A kept"] == 240 * 480 * 4 // 2
    assert column["B in flight"] == 2 * 120 * 360 * 4
    assert column["B kept"] == 480 * 360 * 4 // 2
    assert {"A in flight", "B in use"} <= held(Grid(1, 2, 1)).keys()
    assert {"A in use", "B in use"} <= held(Grid(1, 1, 2)).keys()
    assert {"A in flight", "B in flight"} <= held(Grid(2, 2, 1)).keys()
    # What lies on other workers travels, and what is cut again comes from them.
    cluster, grid = cpus(2), Grid(2, 1, 1)
    for more in ({"owners": (1, 0)}, {"chunks": ((100, 140), (480,))}):
        spec = MatrixSpec((240, 480), **{"chunks": ((120, 120), (480,))} | more)
        shape = replace(problem(240, 480, 360), a=spec)
        layout = Schedule(shape, grid, (), (120, 120), (360,), (480,), band=1)
        assert "A in flight" in memory.held(layout, cluster)[0]
    # What is read when its k-tile comes is kept nowhere.
    assert {"A in flight", "B in flight"} <= held(Grid(2, 1, 1), stream=True).keys()


def test_memory_is_a_sum_of_named_terms():
    shape = problem(26, 34, 38)
    layout = Schedule(shape, Grid(2, 2, 1), (), (13, 13), (19, 19), (17, 17), band=1)
    stay, spill = memory.held(layout, cpus(4))
    assert stay == {
        "partial sums": 13 * 19 * 4,
        "sums being made": 13 * 19 * (4 + 4),
        "A in flight": 2 * 13 * 17 * 4,
        "B in flight": 2 * 17 * 19 * 4,
    }
    assert spill == {"A kept": 26 * 34 * 4 / 4, "B kept": 34 * 38 * 4 / 4}


def test_seconds_are_a_sum_of_named_terms():
    device = DeviceSpec("slow", "cpu", 1000 * GB, 1.0, 1.0)
    cluster = ClusterSpec.homogeneous(device, 2, Link("wire", 2.0, 0.5))
    layout = Schedule(problem(20, 30, 40), Grid(2, 1, 1), (), (10, 10), (40,), (30,), band=1)
    terms = time.seconds(layout, cluster, 3e9)
    assert terms["block products"] == 2 * 10 * 30 * 40 / 1e9
    assert terms["transfers"] == 1.5
    assert terms["scheduling"] == 1e-3
    # B's one block is with one of the two workers, the other one has nothing to do until it comes.
    assert terms["first blocks"] == 30 * 40 * 4 / 2e9 + 2 * 0.5
    assert terms["starting"] == pytest.approx(cluster.call_s + 2 * 1e-4)
    switch = time.SWITCH["cpu"] * cluster.task_overhead_s  # one task on each
    assert terms["between tasks"] == switch
    idle = ("packing", "cutting", "sums between k-tiles", "last sums", "mirroring", "spilling")
    assert [terms[name] for name in idle] == [0] * len(idle)
    hidden = time.FRICTION * (terms["block products"] + switch + terms["scheduling"])
    around = terms["starting"] + terms["first blocks"]
    assert time.total_seconds(terms) == pytest.approx(1.5 + hidden + around)


@pytest.mark.parametrize(("k_tiles", "p_k"), [(1, 1), (3, 1), (6, 2), (5, 2)])
def test_sums_are_handed_from_k_tile_to_k_tile(k_tiles, p_k):
    """Of the busiest worker, in each k-tile of its part of k but the first."""
    device = DeviceSpec("quick", "cpu", 1000 * GB, 1e6, 2.0)
    cluster = ClusterSpec.homogeneous(device, 2 * p_k, Link("wire", 1e6, 0.0))
    layout = Schedule(
        problem(20, 60, 40), Grid(2, 1, p_k), (), (10, 10), (40,), even(60, k_tiles), band=1
    )
    terms = time.seconds(layout, cluster, 0)
    handed_on = (-(-k_tiles // p_k) - 1) * 10 * 40 * 4
    assert terms["sums between k-tiles"] == pytest.approx(time.SUMS_BYTES * handed_on / 2e9)
    without = terms | {"sums between k-tiles": 0.0}
    in_turn = sum(without[name] for name in time.IN_TURN)
    assert in_turn + terms["sums between k-tiles"] == sum(terms[name] for name in time.IN_TURN)


def test_parts_of_k_without_a_k_tile_have_no_share():
    """Their ranks are idle: they receive no sums, and no worker computes for two of them."""
    shape = problem(24, 60, 40)
    cluster = cpus(2)
    layout = Schedule(shape, Grid(2, 1, 4), (), (12, 12), (40,), (30, 30), band=1)
    assert (layout.parts, layout.ranks) == (2, 4)
    moved = communication.moved(layout, 8)
    assert moved.total == communication.volume(shape, Grid(2, 1, 2))
    most = max(counted_transfers.received(layout, 8).values())
    assert most <= moved.busiest == 1.2 * most  # who has no block of B keeps no sums
    one = replace(layout, grid=Grid(1, 1, 8), k_tiles=(60,))
    rate = cluster.slowest.gflops * 1e9
    assert time.seconds(one, cluster, 0)["block products"] == 2 * 24 * 40 * 60 / rate
    assert memory.held(one, cluster)[0]["partial sums"] == 12 * 40 * 4  # of one row panel


def test_one_k_tile_is_kept_where_k_is_not_divided():
    rows, k = (8192,) * 8, 65536
    a = MatrixSpec((k, k), chunks=(rows, (k,)))
    shape = Problem(a, a.T, pack="float32")
    cluster = ClusterSpec.homogeneous(H200, 8)
    given = Cut(given=True)
    whole, _ = lay_out(shape, cluster, Grid(8, 1, 1), Options(), given)
    assert (whole.m_blocks, whole.n_blocks, whole.k_tiles) == (rows, rows, (k,))
    halves, _ = lay_out(shape, cluster, Grid(4, 1, 2), Options(), given)
    assert len(halves.k_tiles) > 1


def test_packing_is_counted_once_for_each_block_or_for_each_product():
    p = replace(problem(4096, 8192, 4096), pack="float32")
    cluster = ClusterSpec.homogeneous(H200, 2)
    layout = Schedule(p, Grid(2, 1, 1), (), (2048, 2048), (2048, 2048), (4096, 4096), band=1)
    size = 2048 * 4096 * 4
    moving = time.PACK_BYTES * size / (H200.copy_gbps * 1e9)
    # Four blocks of A and four of B, on two workers.
    once = time.seconds(layout, cluster, 0)["packing"]
    assert once == pytest.approx(4 * (time.PACK_S + moving))
    # Eight products, each of which packs both of its operands: reads and writes four bytes.
    moving *= time.WITHIN_BYTES * (4 + 4) / (4 * time.PACK_BYTES)
    each = time.seconds(replace(layout, pack_once=False), cluster, 0)["packing"]
    assert each == pytest.approx(2 * 4 * moving)
    half = replace(layout, pack_once=False, problem=replace(p, pack="tf32"))  # writes two
    assert time.seconds(half, cluster, 0)["packing"] == pytest.approx(2 * 4 * moving * 6 / 8)
    assert time.seconds(replace(layout, problem=replace(p, pack="")), cluster, 0)["packing"] == 0


def test_what_has_to_be_cut_again_is_waited_for():
    sub_blocks = (1000,) * 4
    a, b = MatrixSpec((4000, 4000), chunks=(sub_blocks, sub_blocks)), MatrixSpec((4000, 4000))
    cluster, even = cpus(2), (2000, 2000)
    layout = Schedule(Problem(a, b), Grid(2, 1, 1), (), even, even, even, band=1)
    # No block is cut, four are joined to each; half of them come from the other worker.
    assert layout.operands.rechunk == (a.nbytes / 2, 4 + 4, 4, 16 + 8, 1.5 * a.nbytes)
    terms = time.seconds(layout, cluster, 0)
    copied = 2 * 1.5 * a.nbytes / 2 / (cluster.slowest.copy_gbps * 1e9)
    once = 4 * time.PACK_S + 2 * time.FETCH_S
    assert terms["cutting"] == pytest.approx(once + 12 * time.SUB_BLOCK_S + copied)
    fits = replace(layout, problem=Problem(replace(a, chunks=(even, even)), b))
    assert time.seconds(fits, cluster, 0)["cutting"] == 0
    # Half of the first block of A comes from the other worker, and a block of B.
    block, link = 2000 * 2000 * 4, cluster.link
    waits = 2 * link.latency_s + 1.5 * block / (link.gbps * 1e9)
    assert time.seconds(layout, cluster, 0)["first blocks"] == pytest.approx(waits)
    assert time.seconds(fits, cluster, 0)["first blocks"] < waits


def test_a_lone_chain_is_waited_for_where_others_have_two():
    cluster, thirds = ClusterSpec.homogeneous(H200, 2), (1000,) * 3
    a, b = MatrixSpec((3000, 4000)), MatrixSpec((4000, 1000))
    layout = Schedule(Problem(a, b), Grid(2, 1, 1), (), thirds, (1000,), (1000,) * 4, band=2)
    tasks = -(-(layout.tasks + layout.operands.rechunk.tasks) // 2) * time.SWITCH["gpu"]
    terms = time.seconds(layout, cluster, 0)
    each = cluster.task_overhead_s
    assert terms["between tasks"] == pytest.approx((tasks + 3 * time.CHAINED["gpu"]) * each)


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ((65536, 65536, 65536), "stationary C"),
        ((4_000_000, 2000, 2000), "stationary C"),
        ((2000, 20_000_000, 2000), "split k"),
        ((300, 300, 300), "one task"),
    ],
)
def test_strategies_fit_the_shape(shape, strategy):
    plan = plan_matmul(problem(*shape), H200X8)
    assert plan.strategy == strategy
    assert plan.reason


#: m, k, n and matrices: what each shape is, and the arrangement of 2, 4 and 8 workers.
TABLE = {
    "square": ((65536, 65536, 65536, 1), {2: "2 x 1 x 1", 4: "2 x 2 x 1", 8: "4 x 2 x 1"}),
    "small square": ((32768, 32768, 32768, 1), {4: "2 x 2 x 1", 8: "4 x 2 x 1"}),
    "k long": ((8192, 2_097_152, 8192, 1), {2: "1 x 1 x 2", 4: "1 x 1 x 4", 8: "1 x 1 x 8"}),
    "outer": ((131_072, 1024, 131_072, 1), {2: "2 x 1 x 1", 4: "2 x 2 x 1", 8: "4 x 2 x 1"}),
    "m long": ((4_000_000, 2048, 2048, 1), {2: "2 x 1 x 1", 4: "4 x 1 x 1", 8: "8 x 1 x 1"}),
    "n long": ((2048, 2048, 4_000_000, 1), {2: "1 x 2 x 1", 4: "1 x 4 x 1", 8: "1 x 8 x 1"}),
    "A long": ((2048, 1_500_000, 16384, 1), {2: "1 x 1 x 2", 4: "1 x 1 x 4", 8: "1 x 1 x 8"}),
    "stack": ((4096, 4096, 4096, 64), {2: "2 x 1 x 1", 4: "4 x 1 x 1", 8: "8 x 1 x 1"}),
    "many small": ((512, 512, 512, 4096), {2: "2 x 1 x 1", 4: "4 x 1 x 1", 8: "8 x 1 x 1"}),
    "tiny": ((300, 300, 300, 1), {2: "1 x 1 x 1", 4: "1 x 1 x 1", 8: "1 x 1 x 1"}),
    "awkward": ((30011, 20011, 40009, 1), {2: "1 x 2 x 1", 4: "2 x 2 x 1", 8: "2 x 4 x 1"}),
}


@pytest.mark.parametrize("pack", ["", "float32"])
@pytest.mark.parametrize(
    ("name", "workers"), [(name, w) for name, (_, grids_of) in TABLE.items() for w in grids_of]
)
def test_the_arrangement_of_each_shape_and_its_traffic(name, workers, pack):
    (m, k, n, matrices), grids_of = TABLE[name]
    stack = (matrices,) if matrices > 1 else ()
    wanted = Problem(MatrixSpec((*stack, m, k)), MatrixSpec((*stack, k, n)), pack=pack)
    plan = plan_matmul(wanted, ClusterSpec.homogeneous(H200, workers))
    assert str(plan.grid) == grids_of[workers]
    assert plan.bytes_received <= 1.05 * plan.bytes_bound
    assert plan.bytes_received <= 1.05 * communication.volume(wanted, plan.grid)
    assert plan.peak_bytes <= plan.budget_bytes
    # Nobody does much more than an even share, and what is not multiplying is little beside it.
    if plan.strategy != "one task":
        share = matrices * m * n * k / plan.grid.workers
        assert plan.layout.work.most_summed * plan.layout.share_k <= 1.1 * share
        # While one chain of a worker is multiplied, the next k-tile of another one is fetched.
        assert plan.layout.blocks * plan.layout.parts >= 2 * workers


def test_a_product_that_fills_two_gpus_is_not_spilled():
    """206 GB, 114 on each of two with what it needs beside; dask-cuda spills from 0.8 of 151."""
    shape = replace(square(131072), pack="float32")
    plan = plan_matmul(shape, ClusterSpec.homogeneous(H200, 2))
    held = plan.peak_bytes + sum(plan.spill_terms.values())
    assert 0.7 * H200.memory_bytes < held <= plan.budget_bytes == int(0.77 * H200.memory_bytes)
    assert plan.tasks <= 1024
    assert RMM_POOL_SHARE * H200.memory_bytes > plan.budget_bytes  # the pool need not grow for it


def test_what_is_cut_finer_starts_at_once():
    """Every worker keeps a block of A and one of B in the first k-tile: none waits for another."""
    layout = plan_matmul(square(65536), H200X8).layout
    first = {(i, j): layout.grid.rank(layout.worker(i, j, 0)) for i, j in layout.pairs}
    ready = {
        rank
        for (i, j), rank in first.items()
        if layout.grid.rank(layout.tiles.owner("a", 0, i, 0)) == rank
        and layout.grid.rank(layout.tiles.owner("b", 0, j, 0)) == rank
    }
    assert ready == set(range(8))


def test_stacks_stay_where_they_are():
    plan = plan_matmul(Problem(MatrixSpec((64, 999, 999)), MatrixSpec((64, 999, 999))), cpus(8))
    assert not plan.received
    shared = Problem(MatrixSpec((64, 999, 999)), MatrixSpec((999, 999)))
    assert plan_matmul(shared, cpus(8)).bytes_received == 7 * 999 * 999 * 4


def test_what_does_not_fit_is_spilled_and_read_back():
    plan = plan_matmul(
        Problem(MatrixSpec((2**17, 2**17)), MatrixSpec((2**17, 2**17))),
        ClusterSpec.homogeneous(H200, 1),
    )
    beyond = plan.peak_bytes + sum(plan.spill_terms.values()) - plan.budget_bytes
    assert plan.peak_bytes <= plan.budget_bytes
    assert beyond > 0
    assert plan.time_terms["spilling"] == pytest.approx(2 * beyond / time.SPILL_RATE["gpu"])


@pytest.mark.parametrize("workers", [1, 2])
def test_given_blocks_are_also_tried_with_packing_in_every_product(workers):
    """Of all that are packed once, there are better ones than these, which are cut again."""
    spec = MatrixSpec((32768, 32768), chunks=((8192,) * 4,) * 2)
    shape = Problem(spec, spec, pack="float32")
    cluster = ClusterSpec.homogeneous(H200, workers)
    plan = plan_matmul(shape, cluster)
    given = Options(blocks=8192, slabs=8192)
    once = plan_matmul(shape, cluster, options=given).layout
    within = replace(plan, layout=replace(once, pack_once=False))
    assert once.operands.packed
    assert plan.seconds <= within.seconds
    if workers == 2:
        assert within.seconds < replace(plan, layout=once).seconds
        assert not plan.layout.operands.cut_again


def test_blocks_are_packed_for_each_product_where_packed_ones_would_be_spilled():
    packed = Problem(MatrixSpec((131072, 2**18)), MatrixSpec((2**18, 131072)), pack="float32")
    tight = plan_matmul(packed, ClusterSpec.homogeneous(H200, 4))
    ample = plan_matmul(packed, ClusterSpec.homogeneous(H200, 16))
    assert not tight.layout.operands.packed
    assert not tight.time_terms["spilling"]
    assert ample.layout.operands.packed


@pytest.mark.parametrize(
    ("symmetric", "parts", "steps"), [(False, 1, 1), (False, 2, 2), (False, 8, 2), (True, 1, 2)]
)
def test_what_is_held_up_by_other_tasks_waits_for_the_scheduler(symmetric, parts, steps):
    """For packed blocks, for sums of other parts of k, all at once, and for the mirror image."""
    cluster = ClusterSpec.homogeneous(H200, 8)
    problem = Problem(MatrixSpec((65536, 65536)), MatrixSpec((65536, 65536)), pack="float32",
                      symmetric=symmetric)  # fmt: skip
    options = Options(blocks=16384, slabs=8192, p_k=parts)
    plan = plan_matmul(problem, cluster, options=options)
    assert plan.time_terms["from step to step"] == pytest.approx(steps * 3e-3)


@pytest.mark.parametrize(("fan_in", "levels", "blocks"), [(2, 3, 3), (4, 2, 4), (8, 1, 7)])
def test_more_sums_at_once_are_fewer_steps_and_more_bytes_to_one_worker(fan_in, levels, blocks):
    """Of the one block of C, by the worker that keeps it."""
    cluster = ClusterSpec.homogeneous(H200, 8, Link("wire", 1.0, 1.0))
    layout = Schedule(problem(10, 80, 10), Grid(1, 1, 8), (), (10,), (10,), (10,) * 8, band=1)
    layout = replace(layout, fan_in=fan_in)
    terms = time.seconds(layout, cluster, 0)
    assert terms["from step to step"] == pytest.approx(levels * 3e-3)
    each = time.PART * 1.0 + 400 / 1e9
    assert terms["last sums"] == pytest.approx(levels * 1.0 + blocks * each)
    stay, _ = memory.held(layout, cluster)
    assert stay["sums received"] == (fan_in - 1 + 1) * 400


def test_the_next_task_of_a_lone_chain_is_waited_for():
    cluster, lone = ClusterSpec.homogeneous(H200, 2), problem(10, 80, 10)
    one = Schedule(lone, Grid(1, 1, 2), (), (10,), (10,), (10,) * 8, band=1)
    two = Schedule(lone, Grid(1, 1, 2), (), (5, 5), (10,), (10,) * 8, band=2)
    between = [time.seconds(x, cluster, 0)["between tasks"] for x in (one, two)]
    assert between == pytest.approx([(5 * 0.4 + 3 * 3.6) * 0.5e-3, 9 * 0.4 * 0.5e-3])


@pytest.mark.parametrize(("size", "once"), [(8192, False), (16384, False), (65536, True)])
def test_small_blocks_are_packed_by_each_product_that_uses_them(size, once):
    """A task that packs takes longer than packing; large blocks are packed once for many."""
    wanted = Problem(MatrixSpec((size, size)), MatrixSpec((size, size)), pack="float32")
    plan = plan_matmul(wanted, ClusterSpec.homogeneous(H200, 2))
    assert bool(plan.layout.operands.packed) == once
    packs = sum(len(plan.layout.k_tiles) * count for count in (
        len(plan.layout.m_blocks), len(plan.layout.n_blocks)))  # fmt: skip
    assert plan.tasks == plan.layout.blocks * len(plan.layout.k_tiles) + packs * once
    given = plan_matmul(wanted, plan.cluster, options=Options(blocks=size // 2))
    assert given.layout.operands.packed, "kernels must not depend on the workers"


def test_tall_matrix_moves_only_the_small_operand():
    plan = plan_matmul(problem(4_000_000, 2000, 2000), H200X8)
    assert plan.grid == Grid(8, 1, 1)
    assert plan.bytes_received == 7 * 2000 * 2000 * 4 == plan.bytes_bound


def test_a_thousand_gpus_are_planned_on_a_laptop():
    plan = plan_matmul(square(524288), ClusterSpec.homogeneous(H200, 1024))
    assert plan.grid.workers == 1024
    assert plan.flops == 2 * 524288**3
    assert len(plan.received) == 1024
    text = str(plan.check())
    for word in ("1024 of NVIDIA H200", "moved", "2D bound", "memory", "time"):
        assert word in text


def test_the_share_that_crosses_nodes():
    shape = problem(30, 50, 70)  # |A| = 6000, |B| = 14000, |C| = 8400 bytes
    share = communication.share_between_nodes
    # 4 x 4 workers in nodes of 4: a node is a grid row, so only B's columns leave it.
    assert share(shape, Grid(4, 4, 1), 4) == pytest.approx(3 * 14000 / (3 * 6000 + 3 * 14000))
    # In nodes of 8 there are two rows on each: one of three copies of B stays inside.
    assert share(shape, Grid(4, 4, 1), 8) == pytest.approx(2 * 14000 / (3 * 6000 + 3 * 14000))
    assert share(shape, Grid(4, 4, 1), 16) == 0
    assert share(shape, Grid(1, 1, 8), 4) == pytest.approx(4 / 7)
    assert share(shape, Grid(1, 1, 1), 1) == 0


def test_the_same_count_block_by_block():
    shape = problem(240, 480, 360)
    for grid, per_node in ((Grid(4, 4, 1), 4), (Grid(4, 4, 1), 8), (Grid(2, 8, 1), 4)):
        layout = Schedule(shape, grid, (), even(240, 16), even(360, 16), even(480, 16), band=16)
        sent = [
            (owner, user, size)
            for kept, users in counted_transfers._count_operands(layout)
            for (owner, size), user in product(kept.items(), users)
            if user != owner
        ]
        total = sum(size for *_, size in sent)
        far = sum(size for owner, user, size in sent if owner // per_node != user // per_node)
        assert far / total == pytest.approx(
            communication.share_between_nodes(shape, grid, per_node), abs=0.02
        )


@pytest.mark.parametrize("gpus", [16, 64, 256, 1024])
def test_slow_links_between_nodes_cost_time_and_turn_the_grid(gpus):
    # n is long: B is the large operand, and stays within nodes if it can.
    shape = problem(131072, 131072, 1_048_576)
    fast = ClusterSpec.homogeneous(H200, gpus)
    nodes = replace(fast, per_node=8, between=Link("slow", 5.0, 1e-3))
    near, far = plan_matmul(shape, fast), plan_matmul(shape, nodes)
    assert far.seconds >= near.seconds
    share = communication.share_between_nodes
    assert share(shape, far.grid, 8) <= share(shape, near.grid, 8)
    assert far.time_terms["transfers"] > 0
    assert "8 per node, slow between nodes" in str(far)
    assert "between nodes" in str(far).split("moved")[1]
    assert "node" not in str(near)


def test_a_cluster_has_no_negative_nodes():
    with pytest.raises(OptionError, match="per_node=-1"):
        ClusterSpec((CPU,), per_node=-1)


def test_a_plan_that_moves_more_says_what_speaks_against_the_one_that_moves_less():
    a = MatrixSpec((4000, 6000), chunks=((1000,) * 4, (1000,) * 6))
    b = MatrixSpec((6000, 5000), chunks=((1500,) * 4, (1500,) * 3 + (500,)))
    plan = plan_matmul(Problem(a, b), cpus(2))
    cut = human(plan.layout.operands.rechunk.nbytes)
    assert f"move, about {cut} of them to cut operands; next best is 1 x 1 x 2" in plan.reason
    assert plan.reason.endswith(
        "as fast within 2%, but with sums of 2 parts of k, which travel last"
    )


def test_drawbacks_are_the_ones_that_decide():
    own = Rank(False, 4.0, 100, 1, 1)
    assert _drawback(Rank(True, 3.0, 50, 1, 1), own) == "which does not fit"
    assert _drawback(Rank(False, 5.0, 50, 1, 1), own) == "5 s in place of 4"
    assert _drawback(Rank(False, 4.01, 50, 1, 1), own) == "as fast within 2%"


def test_plan_text_of_a_small_cluster():
    plan = plan_matmul(square(4096), cpus(4), options=Options(blocks=1024, slabs=2048))
    assert str(plan).splitlines() == [
        "product   4096 x 4096 @ 4096 x 4096 -> float32, precision float32, 1.374e+11 flop",
        "workers   4 of cpu, tcp, rates as shipped",
        "grid      2 x 2 x 1 (p_m x p_n x p_k): stationary C, because 134 MB move; next best is "
        "4 x 1 x 1 with 201 MB",
        "blocks    C in 4 of 1024 x 4 of 1024, k in k-tiles of 2 of 2048",
        "order     32 tasks in one row panel",
        "moved     134 MB between workers, 33.6 MB to the busiest, 1.00 x the 2D bound",
        "memory    92.3 MB of 1.2 GB per worker (partial sums 16.8 MB, sums being made 8.39 MB, "
        "A in flight 33.6 MB, B in flight 33.6 MB)",
        "          and 33.6 MB that may be spilled (A kept 16.8 MB, B kept 16.8 MB)",
        "time      0.727 s, 189.1 GFLOP/s (block products 0.687, transfers 0.0336, sums between "
        "k-tiles 0.00336, between tasks 0.016, scheduling 0.016, starting 0.0152)",
    ]


def test_ill_fitting_chunks_are_replaced_not_cut_into_their_union():
    a = MatrixSpec((4000, 4001), chunks=((4000,), (7,) * 571 + (4,)))
    b = MatrixSpec((4001, 4000), chunks=((11,) * 363 + (8,), (4000,)))
    layout = plan_matmul(Problem(a, b), cpus(4)).layout
    assert len(layout.k_tiles) <= 8
    assert min(layout.k_tiles) > 100


def test_fitting_chunks_are_kept_and_tiny_ones_joined():
    kept = MatrixSpec((4096, 4096), chunks=((1024,) * 4, (1024,) * 4))
    layout, _ = lay_out(Problem(kept, kept), cpus(4), Grid(2, 2, 1), Options())
    assert layout.m_blocks == (1024,) * 4
    assert layout.n_blocks == (2048,) * 2
    tiny = MatrixSpec((4096, 4096), chunks=((1,) * 4096, (1000,) * 4 + (96,)))
    layout, _ = lay_out(Problem(tiny, kept), cpus(4), Grid(2, 2, 1), Options())
    assert len(layout.m_blocks) <= 8


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("chunk", [200, 400])
def test_chunks_are_kept_where_there_is_no_blas(workers, chunk):
    """Joined, they would leave one of two threads or workers two thirds, and be slower each."""
    spec = MatrixSpec((1200, 1200), "int32", chunks=((chunk,) * (1200 // chunk),) * 2)
    shape = Problem(spec, spec, dtype="int32", accumulate="int32")
    layout = plan_matmul(shape, replace(cpus(workers), threads=3 - workers)).layout
    assert {*layout.m_blocks, *layout.n_blocks, *layout.k_tiles} == {chunk}
    fast = plan_matmul(Problem(spec, spec), cpus(workers)).layout
    assert fast.k_tiles == (1200,)


@pytest.mark.parametrize(
    ("dtype", "size", "longest"),
    [("int64", 1000, 400), ("float128", 10_000, 450), ("int64", 64_000, 2100)],
)
def test_blocks_without_blas_are_short_but_not_too_many(dtype, size, longest):
    spec = MatrixSpec((size, size), dtype)
    plan = plan_matmul(Problem(spec, spec, dtype=dtype, accumulate=dtype), cpus(2))
    layout = plan.layout
    assert max(*layout.m_blocks, *layout.n_blocks, *layout.k_tiles) <= longest
    assert plan.tasks < 500_000


def test_large_operands_that_can_be_read_again_are_streamed():
    plan = plan_matmul(problem(4000, 140_000, 4000, rereadable=True), cpus(2))
    assert plan.layout.stream
    assert not plan.spill_terms
    assert plan.check() is plan
    fixed = plan_matmul(problem(4000, 140_000, 4000), cpus(2))
    assert not fixed.layout.stream
    assert sum(fixed.spill_terms.values()) > fixed.budget_bytes


def test_c_larger_than_memory_is_made_in_row_panels():
    plan = plan_matmul(problem(60_000, 5000, 60_000, rereadable=True), cpus(2))
    layout = plan.layout
    assert layout.row_panels > 1
    assert plan.peak_bytes <= plan.budget_bytes
    rows = len(layout.row_sizes)
    assert sorted({layout.row_panel(row) for row in range(rows)}) == list(range(layout.row_panels))


def test_check_names_the_worst_worker_the_figure_the_limit_and_what_fits():
    small = DeviceSpec("tiny", "cpu", 100_000_000, 50.0, 20.0, spills=False)
    cluster = ClusterSpec((CPU, small), LOCAL_TCP, ("tcp://a:1", "tcp://b:2"))
    plan = plan_matmul(square(20_000), cluster)
    with pytest.raises(MemoryBudgetError, match=r"tcp://b:2 \(tiny\) would hold") as caught:
        plan.check()
    text = str(caught.value)
    assert human(plan.peak_bytes) in text
    assert human(plan.budget_bytes) in text
    assert "give each worker" in text


@given(st.integers(0, 2**70), st.integers(1, 2**40))
def test_ceil_div_is_exact(count, size):
    wholes = ceil_div(count, size)
    assert (wholes - 1) * size < count <= wholes * size


@pytest.mark.parametrize(
    ("dtype", "cost_of_one"),
    [("float32", 1), ("float64", 2), ("complex64", 4), ("complex128", 8), ("int64", 50)],
)
def test_multiply_adds_cost_more_in_other_dtypes(dtype, cost_of_one):
    assert replace(square(8), accumulate=dtype).relative_cost == cost_of_one


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_long_doubles_have_no_blas(dtype):
    name = str(np.dtype(dtype))
    if name not in ("float64", "complex128"):  # which they are on some systems
        assert replace(square(8), accumulate=name).relative_cost > 100


def test_fixed_blocks_k_tiles_and_parts_do_not_depend_on_the_workers():
    options = Options(blocks=(1000, 700), slabs=900, p_k=3)
    layouts = [
        plan_matmul(square(5000), cpus(workers), options=options).layout
        for workers in (1, 2, 3, 5, 8, 16)
    ]
    assert len({(x.m_blocks, x.n_blocks, x.k_tiles, x.part_of) for x in layouts}) == 1


@pytest.mark.parametrize(
    "bad",
    [{"blocks": 0}, {"blocks": (1, 2, 3)}, {"slabs": -1}, {"p_k": 1.5}, {"blocks": (4, True)}],
)
def test_options_are_positive_integers(bad):
    with pytest.raises(OptionError, match=next(iter(bad))):
        Options(**bad)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="4 columns of a must equal the 5 rows of b"):
        Problem(MatrixSpec((3, 4)), MatrixSpec((5, 6)))
    with pytest.raises(ShapeError, match="broadcast"):
        Problem(MatrixSpec((2, 3, 4)), MatrixSpec((3, 4, 6)))
    with pytest.raises(ShapeError, match="at least 2 dimensions"):
        MatrixSpec((3,))
    with pytest.raises(ShapeError, match="add up"):
        MatrixSpec((3, 4), chunks=((3,), (3,)))


def test_specs_refuse_nonsense():
    with pytest.raises(OptionError, match="at least one worker"):
        ClusterSpec(())
    with pytest.raises(OptionError, match="kind 'tpu'"):
        DeviceSpec("x", "tpu", 1, 1.0, 1.0)
    with pytest.raises(OptionError, match="addresses"):
        ClusterSpec((CPU,), NVLINK, ("a", "b"))


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (999_999, "1 MB")]
)
def test_human_sizes(size, text):
    assert human(size) == text


def test_blocks_text():
    assert blocks_text((5,)) == "1 of 5"
    assert largest_share((5, 5, 2), 2) == 7


@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.integers(1, 400),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 40),
    st.none() | st.integers(1, 5),
)
def test_every_layout_covers_the_product(m, k, n, workers, blocks, k_tiles, p_k):
    # So many of them at most, and any size: shapes of millions of tasks are refused.
    edges = Options(blocks=-(-max(m, n) // blocks), slabs=-(-k // k_tiles), p_k=p_k)
    plan = plan_matmul(problem(m, k, n), cpus(workers), options=edges)
    layout = plan.layout
    assert (sum(layout.m_blocks), sum(layout.n_blocks), sum(layout.k_tiles)) == (m, n, k)
    assert layout.first_k_tile[0] == 0
    assert layout.first_k_tile[-1] == len(layout.k_tiles)
    assert list(layout.part_of) == sorted(layout.part_of)
    sums = len(merges(layout.parts, 0, layout.fan_in))
    assert plan.tasks == layout.blocks * (len(layout.k_tiles) + sums)
    assert plan.seconds > 0
    assert str(plan)


@pytest.mark.parametrize(
    ("size", "count", "workers", "blocks"),
    [
        (46336, 3, 1, (15616, 15616, 15104)),
        # 11648 would give one of two workers half a percent too much.
        (46336, 4, 2, (11584,) * 4),
        (65536, 4, 4, (16384,) * 4),
        (4000, 3, 1, (1344, 1344, 1312)),
        (200, 3, 1, (68, 68, 64)),  # too short for more
        (100, 3, 1, (34, 34, 32)),
    ],
)
def test_blocks_are_round_where_no_worker_gets_more_for_it(size, count, workers, blocks):
    assert boundaries._evenly(size, count, workers) == blocks


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("float64", 8), ("bfloat16", 2), ("int8", 1),
                        ("complex128", 16), ("bool", 1)]
)  # fmt: skip
def test_elements_are_as_long_as_their_dtype_says(dtype, size):
    assert MatrixSpec((10, 20), dtype).nbytes == 200 * size
    assert MatrixSpec((10, 20), dtype, 3).nbytes == 600  # given all the same


def test_a_dtype_that_does_not_say_how_long_it_is():
    with pytest.raises(DTypeError, match=r"'f8' does not say.*float64.*itemsize"):
        MatrixSpec((10, 20), "f8")


def test_workers_on_paper_reach_other_nodes_as_they_would():
    assert ClusterSpec.homogeneous(H200, 8).between is INFINIBAND
    assert ClusterSpec.homogeneous(H200, 8, LOCAL_TCP).between is LOCAL_TCP


def test_every_term_of_the_seconds_is_part_of_their_sum():
    """One that is in none of the three groups would not count, and nobody would see."""
    square = MatrixSpec((8192, 8192))
    terms = plan_matmul(Problem(square, square), H200X8).time_terms
    groups = (time.IN_TURN, time.BESIDE, time.AROUND)
    assert sorted(terms) == sorted(name for group in groups for name in group)
