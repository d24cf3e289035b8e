"""The least bytes of a contraction, against all assignments one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

pytest.importorskip("scipy")
from multimm_benchmarks.least_bytes import Blocks, least

SIZES = {"i": (2, 3), "k": (4, 1), "j": (5,)}


def operand(labels, seed):
    sizes = {x: SIZES[x] for x in labels}
    at = [*product(*(range(len(sizes[x])) for x in labels))]
    rng = np.random.default_rng(seed)
    return Blocks(labels, sizes, {n: int(rng.integers(2)) for n in at}, lies=True)


def by_hand(a, b, uneven):
    pairs = [*product(range(2), range(2))]
    load = [SIZES["i"][i] * SIZES["k"][k] for i, k in pairs]
    room = max(uneven, max(load) / sum(load) / 2) + 1e-6
    found = []
    for workers in product(range(2), repeat=4):
        share = sum(n for n, at in zip(load, workers, strict=True) if at) / sum(load)
        if uneven and abs(share - 0.5) > room:
            continue
        at = dict(zip(pairs, workers, strict=True))
        of_a = sum(a.nbytes(p, 4) for p in pairs if at[p] != a.where[p])
        of_b = sum(b.nbytes((k, 0), 4) for k in range(2)
                   if any(at[i, k] != b.where[k, 0] for i in range(2)))  # fmt: skip
        of_c = sum(4 * SIZES["i"][i] * 5 for i in range(2) if at[i, 0] != at[i, 1])
        found.append(of_a + of_b + of_c)
    return min(found)


@pytest.mark.parametrize("uneven", [0, 0.1])
@pytest.mark.parametrize("seed", range(12))
def test_no_assignment_moves_less(seed, uneven):
    a, b = operand("ik", seed), operand("kj", seed + 100)
    assert least("ik,kj->ij", [a, b], [(0, 1)], uneven) == pytest.approx(by_hand(a, b, uneven))


def test_one_array_on_both_sides_travels_once():
    x = Blocks("ti", {"t": (4, 4), "i": (3,)}, {(0, 0): 0, (1, 0): 0}, lies=True)
    y = x._replace(labels="tj", sizes={"t": (4, 4), "j": (3,)})
    assert least("ti,tj->ij", [x, y], [(0, 1)], 0) == pytest.approx(0)
    # Half of x, or the sums: what is less.
    assert least("ti,tj->ij", [x, y], [(0, 1)], 0.1) == pytest.approx(4 * 12 + 4 * 9)


def test_steps_keep_what_they_made():
    """(A B) C on one worker: nothing has to travel, in two steps."""
    sizes = dict.fromkeys("abcd", (2, 2))
    here = dict.fromkeys(product(range(2), repeat=2), 1)
    given = [Blocks(x, {y: sizes[y] for y in x}, dict(here), lies=True) for x in ("ab", "bc", "cd")]
    assert least("ab,bc,cd->ad", given, [(0, 1), (0, 1)], 0) == pytest.approx(0)
    assert least("ab,bc,cd->ad", given, [(0, 1), (0, 1)], 0.1) > 0
