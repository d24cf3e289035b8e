"""How layouts are ranked: what is waited for at first, and which of nearly equal ones wins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.planning import choice, search
from multimm.planning.cost import first_blocks, time
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.search import Rank
from multimm.planning.spec import H200, ClusterSpec, DeviceSpec, Link, MatrixSpec
from multimm.planning.tiling.grid import Grid

GB = 10**9
WIRE = Link("wire", 2.0, 0.5)


def problem(m, k, n, **options):
    return Problem(MatrixSpec((m, k)), MatrixSpec((k, n)), **options)


def four(gflops):
    return ClusterSpec.homogeneous(DeviceSpec("x", "cpu", 1000 * GB, gflops, 1.0), 4, WIRE)


def waiting(layout, cluster):
    return time.seconds(layout, cluster, 0)["first blocks"]


def test_a_worker_multiplies_what_it_keeps_while_the_rest_of_the_first_slab_comes():
    cluster = four(1.0)
    shape, fours = problem(400, 100, 400), (100,) * 4
    layout = Schedule(shape, Grid(2, 2, 1), (), fours, fours, (50, 50), band=2)
    # Of two block rows and two block columns it keeps one each, and multiplies them at once.
    own, arrival = 2 * 100 * 100 * 50 / 1e9, 3 * WIRE.latency_s + 50 * 100 * 4 / 2e9
    assert waiting(layout, cluster) == pytest.approx(arrival - own)
    # A stays where it is, so there is less to come, and two products meanwhile.
    column = Schedule(shape, Grid(4, 1, 1), (), fours, fours, (50, 50), band=1)
    arrival = 4 * WIRE.latency_s + 50 * 100 * 4 / 2e9
    assert waiting(column, cluster) == pytest.approx(arrival - own)
    alone = Schedule(shape, Grid(1, 1, 4), (), (400,), (400,), (25,) * 4, band=1)
    assert waiting(alone, cluster) == 0
    assert waiting(layout, four(1e-4)) == 0


@pytest.mark.parametrize(
    ("grid", "swapped", "fetches", "products"),
    [
        (Grid(2, 2, 1), (0, 6), 3, 0),  # blocks (0, 0) and (3, 0), of different rows of the grid
        (Grid(2, 1, 2), (0, 1), 3, 2),  # of different parts of k
        (Grid(2, 1, 2), (0, 2), 3, 2),  # of different rows
    ],
)
def test_blocks_that_lie_elsewhere_are_waited_for(grid, swapped, fetches, products):
    """Two blocks of A change places: then somebody lacks one more."""
    fours, slabs = (100,) * 4, (50, 50)
    home = Schedule(problem(400, 100, 400), grid, (), fours, fours, slabs, band=2)
    owners = [home.grid.rank(home.tiles.home("a", 0, i, s)) for i in range(4) for s in range(2)]

    def lying(owners):
        a = MatrixSpec((400, 100), chunks=(fours, slabs), owners=tuple(owners))
        return replace(home, problem=replace(home.problem, a=a))

    assert lying(owners).operands.elsewhere == ()
    assert first_blocks._first_slab(lying(owners)) == first_blocks._first_slab(home)
    i, j = swapped
    owners[i], owners[j] = owners[j], owners[i]
    assert lying(owners).operands.elsewhere == ("a",)
    size = 50 * 100 * 4
    # Without products of its own a worker needs one of each operand.
    expected = fetches, products, size if products else 2 * size
    assert first_blocks._first_slab(lying(owners)) == expected


def test_what_packs_once_has_no_packing_left_to_do_meanwhile():
    shape, sixteens = problem(*[65536] * 3, pack="tf32"), (16384,) * 4
    once = Schedule(shape, Grid(2, 2, 1), (), sixteens, sixteens, (65536,), band=2)
    cluster = ClusterSpec.homogeneous(H200, 4, Link("slow", 50.0, 0.05))
    for layout in (once, replace(once, pack_once=False)):
        terms = time.seconds(layout, cluster, 0)
        product = terms["block products"] / 4 + (
            0 if layout.operands.packed else terms["packing"] / 4
        )
        arrival = 3 * 0.05 + 16384 * 65536 * layout.operands.width("a") / 50e9
        assert terms["first blocks"] == pytest.approx(arrival - product)


def test_plans_without_parts_of_k_are_preferred():
    def prefer(seconds, moved, parts=1, too_large=False):
        split, whole = Rank(False, 1.0, 100, 2, 1), Rank(too_large, seconds, moved, parts, 1)
        return choice._preferred({"split": split, "whole": whole})

    assert prefer(1.09, 200) == "whole"
    assert prefer(1.11, 200) == prefer(1.05, 201) == "split"
    assert prefer(1.05, 200, too_large=True) == prefer(1.05, 90, parts=2) == "split"
    assert prefer(1.02, 90, parts=2) == "whole"  # moves less, nearly as fast


RANKS = st.builds(
    Rank,
    st.just(False),
    st.floats(1, 1.2),
    st.integers(0, 9),
    st.sampled_from([1, 1, 2]),
    st.just(1),
)


@given(st.lists(RANKS, min_size=1, max_size=8), RANKS)
def test_one_more_candidate_makes_no_choice_slower_by_more_than_the_rule_allows(ranks, more):
    """2 % for fewer bytes; and 10 % more for fewer parts of k."""
    before = dict(enumerate(ranks))
    after = before | {len(ranks): more}
    for choose, allowed in (
        (choice._cheapest, search.NEARLY),
        (choice._preferred, search.NEARLY * choice.UNSPLIT),
    ):
        chosen = [found[choose(found)].seconds for found in (before, after)]
        assert chosen[1] <= allowed * chosen[0]


def test_the_transpose_of_an_arrangement_that_does_as_well_is_not_searched():
    cluster = ClusterSpec.homogeneous(H200, 4)
    shape = problem(32768, 32768, 32768, pack="float32")
    found = search._finalists(search.cut_alike(shape, cluster, Options()), gram=False)
    assert Grid(2, 2, 1) in found
    assert not {Grid(4, 1, 1), Grid(1, 4, 1)} <= set(found)
    wide = replace(shape, b=MatrixSpec((32768, 131072)))
    found = search._finalists(search.cut_alike(wide, cluster, Options()), gram=False)
    assert {Grid(1, 4, 1), Grid(2, 2, 1)} <= set(found)
