"""What plans foresee of operands in host memory: what goes up first, and what comes back last."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multimm.planning.candidates.owner_computes import in_portions
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import host_transfers, time
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec
from multimm.planning.tiling.grid import regular


def hosted_square(workers=1, n=32768, **more):
    chunks = regular(n, 8192)
    owners = tuple(i % workers for i in range(len(chunks) ** 2))
    spec = MatrixSpec((n, n), chunks=(chunks, chunks), owners=owners)
    return Problem(spec, spec, uploaded=("a", "b"), downloaded=True, pack="tf32", **more)


@pytest.mark.parametrize("waves", [1, 2])
def test_blocks_that_are_finished_together_come_back_behind_the_last_product(waves):
    """Two H200s took 0.42 s for 32768 squares in four slabs; 0.32 were predicted."""
    cluster = ClusterSpec.homogeneous(H200, 1)
    layout = plan_matmul(hosted_square(), cluster, precision="tf32").layout
    layout = replace(layout, m_blocks=(8192,) * 4, n_blocks=(8192,) * 4, band=4 // waves)
    assert layout.waves == waves
    alone = 2**28 / host_transfers.DOWNLOAD_RATE  # a block
    for slabs in (1, 4):
        terms = time.seconds(replace(layout, slabs=(32768 // slabs,) * slabs), cluster, 0)
        beside, last = terms["from the GPUs"], terms["last blocks from a GPU"]
        assert beside + last == pytest.approx(16 * alone + host_transfers.COPIED_S)
        pace = max(terms["to the GPUs"], sum(terms[name] for name in time.IN_TURN))
        meanwhile = pace / slabs * (1 - waves / 16)  # from its first block on
        of_wave = (16 * alone - meanwhile) / waves
        assert last - host_transfers.COPIED_S == pytest.approx(max(alone, of_wave))


def test_what_the_first_product_multiplies_goes_up_before_it():
    cluster = ClusterSpec.homogeneous(H200, 1)
    layout = plan_matmul(hosted_square(), cluster, precision="tf32").layout
    layout = replace(layout, m_blocks=(8192,) * 4, n_blocks=(8192,) * 4, band=4)
    whole = 2 * 2**32
    for slabs in (1, 4):
        cut = replace(layout, slabs=(32768 // slabs,) * slabs)
        beside, before = host_transfers.going_up(cut, cluster)
        assert before == pytest.approx(
            whole / 4 / slabs / host_transfers.UPLOAD_RATE + host_transfers.COPIED_S
        )
        tasks = host_transfers.UPLOAD_S * host_transfers.host_tasks(cut)
        assert beside + before == pytest.approx(
            whole / host_transfers.UPLOAD_RATE + tasks + host_transfers.COPIED_S
        )


def test_chunks_that_are_cut_go_up_with_those_of_other_blocks():
    cluster = ClusterSpec.homogeneous(H200, 2)
    layout = plan_matmul(hosted_square(2), cluster, precision="tf32").layout
    cut = replace(layout, m_blocks=(8192,) * 4, n_blocks=(8192,) * 4, slabs=(32768,), band=2)
    assert cut.operands.cut_apart
    _, before = host_transfers.going_up(cut, cluster)
    first = 2 * 8192 * 32768 * 4 / host_transfers.UPLOAD_RATE
    assert before == pytest.approx(host_transfers.BEFORE_CUT * first + host_transfers.COPIED_S)


def test_all_of_a_bundled_operand_goes_up_before_the_first_portion():
    problem, cluster = hosted_square(2), ClusterSpec.homogeneous(H200, 2)
    found = [x for x in in_portions(problem, cluster) if x.portions.bundled]
    assert found
    for layout in found:
        own = layout.in_place
        alone = replace(layout, portions=replace(layout.portions, bundled=False))
        portion = max(layout.portions.lengths) * 32768 * 4
        block = max(own.work.across) * 32768 * 4
        assert alone.operands.first_use == {own.large: portion, own.small: block}
        assert layout.operands.first_use == {own.large: portion, own.small: 2**31}
