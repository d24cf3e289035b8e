"""What travels: counted at the workers' transport, against the plan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import dask.array as da
import numpy as np
import pytest
from clusters import counting, received, scattered
from distributed import Client
from golden_plans import chunks_of, workers_of
from small import integers

import multimm
from multimm.cluster.calibration import store
from multimm.cluster.describe import describe
from multimm.cluster.inspect.cluster_spec import listed

# ------------------------------------------------------------ planned is what is counted

FIXED = {"blocks": 24, "slabs": 24}
SCALED = {"alpha": 2, "beta": 3}
SQUARE = "96x96 in 24x24"
#: Shape and chunks of A and of B, as in `golden_plans`; arguments; and of C, if one is added.
PRODUCTS = (
    ("120x120 in 40x40", "120x120 in 40x40", {"blocks": 40, "slabs": 40}),
    ("130x110 in ~5x~3", "110x90 in ~3x~4", {}),
    # Tall, wide, and with a long k.
    ("6000x40 in 600x40", "40x8 in 40x8", {}),
    ("6000x40 in ~20x20", "40x8 in 10x8", {}),
    ("10x40 in 10x40", "6000x40 in 250x40", {"trans_b": True}),
    ("6000x30 in 600x30", "6000x20 in 600x20", {"trans_a": True}),
    ("6000x30 in ~10x30", "6000x20 in ~10x20", {"trans_a": True}),
    # Symmetric products.
    ("6000x60 in 600x60", "a", {"trans_a": True}),
    ("150x300 in ~4x100", "a", {"trans_b": True}),
    (SQUARE, "a", FIXED | {"trans_b": True, "p_k": 2}),
    # Stacks.
    ("12x30x30 in 1x30x30", "12x30x30 in 1x30x30", {}),
    ("13x30x40 in 3x30x40", "13x40x20 in 2x40x20", {}),
    # Operands that are cut, and parts of k.
    ("120x120 in 40x60", "120x120 in 60x40", {"blocks": 30, "slabs": 40, "p_k": 2}),
    ("96x96 in 36x48", "96x96 in 12x96", FIXED | {"p_k": 3}),
    # A C in other chunks than the plan's blocks is added, and none of it goes to several workers.
    ("120x120 in 40x60", "120x120 in 60x40", SCALED | {"c": "120x120 in 40x40"}),
    (SQUARE, SQUARE, FIXED | SCALED | {"p_k": 1, "c": "96x96 in 12x12"}),
    (SQUARE, SQUARE, FIXED | SCALED | {"p_k": 2, "c": "96x96 in 36+60x96"}),
    (SQUARE, SQUARE, FIXED | SCALED | {"p_k": 1, "c": "96x96 in 96x96"}),
    (SQUARE, "a", FIXED | SCALED | {"trans_b": True, "p_k": 1, "c": "96x96 in 18x18"}),
    (SQUARE, "a", FIXED | SCALED | {"trans_b": True, "p_k": 2, "c": "96x96 in 48x48"}),
    # Chunks of the result that are others than the plan's blocks.
    ("120x120 in 40x60", "120x120 in 60x40", {"chunks": "operands"}),
    ("120x120 in 40x60", "120x120 in 60x40", {"chunks": 50}),
    ("96x96 in 12x12", "96x96 in 12x12", FIXED | {"chunks": "operands"}),
    ("96x96 in 48x48", "96x96 in 48x48", FIXED | {"chunks": "operands"}),
    (SQUARE, SQUARE, FIXED | {"chunks": -1}),
    (SQUARE, SQUARE, FIXED | {"p_k": 2, "chunks": 36}),
    (SQUARE, SQUARE, {"blocks": (24, 48), "slabs": 24, "chunks": (1, -1)}),
    (SQUARE, "a", FIXED | {"trans_b": True, "chunks": 36}),
    # One array on both sides: a block that a worker needs for both comes once.
    (SQUARE, "a", FIXED | {"trans_a": True, "trans_b": True}),
)
#: Where A lies: see `golden_plans`. What is lazy is made by tasks where the plan wants it.
WHERE = ("turn", "next", "bands", "random", "uneven", "one", "grid", "lazy")
#: Workers, a product, and where its A lies: of 2 and 3 workers a sixteenth; of 4 each product once,
#: which `make test` runs.
TABLE = [
    pytest.param(workers, of, where, marks=[pytest.mark.slow] * (workers < 4))
    for workers, of, where in product((2, 3, 4), range(len(PRODUCTS)), range(len(WHERE)))
    if (workers + of + where) % (8 if workers == 4 else 16) == 4
]


@pytest.fixture(scope="module")
def client(request, tmp_path_factory) -> Iterator[Client]:
    """Workers so slow, by what was measured, that tiny products are worth sharing out."""
    with pytest.MonkeyPatch.context() as patch, counting(request.param) as client:
        patch.setenv("MULTIMM_CACHE_DIR", str(tmp_path_factory.mktemp("rates")))
        store.forget()
        device = describe(client).devices[0]
        slow = store.DeviceRates(device.name, device.gflops, 0.003, 10.0, (), "2026-01-01")
        store.keep(store.Rates((slow,)))
        yield client
    store.forget()


def in_place(client: Client, text: str, at: str, seed: int) -> tuple[np.ndarray, da.Array]:
    """Small integers, and an array of them in chunks on workers, or of tasks."""
    shape_text, _, edges = text.split()
    shape = tuple(map(int, shape_text.split("x")))
    chunks = tuple(chunks_of(x, size) for x, size in zip(edges.split("x"), shape, strict=True))
    x = integers(shape, seed)
    if at == "lazy":
        return x, da.from_array(x, chunks=chunks, inline_array=True).map_blocks(np.copy)
    owners = workers_of(at, list(map(len, chunks)), len(listed(client)))
    return x, scattered(client, x, chunks, owners)


@pytest.mark.parametrize(("client", "of", "where"), TABLE, indirect=["client"], scope="module")
def test_what_travels_is_what_was_planned_and_the_result_is_exact(client, of, where):
    (text_a, text_b, arguments), at = PRODUCTS[of], WHERE[where]
    x, a = in_place(client, text_a, at, 0)
    other = WHERE[(where + of + len(listed(client))) % len(WHERE)]
    y, b = (x, a) if text_b == "a" else in_place(client, text_b, other, 1)
    arguments = dict(arguments)
    expected = x.T if arguments.get("trans_a") else x
    expected = expected @ (y.T if arguments.get("trans_b") else y)
    if text_c := arguments.get("c"):
        z, arguments["c"] = in_place(client, text_c, at, 2)
        expected = arguments["alpha"] * expected + arguments["beta"] * z
    plan = multimm.plan(a, b, **arguments)
    assert plan.tasks > 1
    if {"trans_a", "trans_b", "c"} & {*arguments}:
        lazy = multimm.gemm(arguments.pop("alpha", 1), a, b, **arguments)
    else:
        lazy = multimm.matmul(a, b, **arguments)
    c, moved = received(client, lazy)
    np.testing.assert_array_equal(c.compute(), expected)
    if "at most" in str(plan):
        assert moved <= plan.bytes_moved
    elif "placed by Dask" in str(plan):  # each block of an operand at most once, and each sum
        sums = plan.layout.grid.p_k * expected.nbytes
        assert moved <= x.nbytes + y.nbytes + sums
    else:
        assert moved == plan.bytes_moved


@pytest.mark.parametrize("client", [4], indirect=True)
def test_a_product_of_a_product_moves_what_both_plans_say(client):
    """What is between the two stays where the first one leaves it."""
    (x, a), (y, b), (z, e) = (in_place(client, SQUARE, "turn", seed) for seed in range(3))
    c = multimm.matmul(a, b, **FIXED)
    plans = multimm.plan(a, b, **FIXED), multimm.plan(c, e, **FIXED)
    assert plans[1].bytes_received == plans[1].bytes_bound
    d, moved = received(client, multimm.matmul(c, e, **FIXED))
    assert moved == sum(plan.bytes_moved for plan in plans)
    np.testing.assert_array_equal(d.compute(), x @ y @ z)
