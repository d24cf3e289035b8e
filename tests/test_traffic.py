"""What travels: counted at the workers' transport, against the bound and against Dask."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from distributed import wait

import multimm
from multimm.cluster.transfers import received_bytes, reset_received_bytes

pytestmark = pytest.mark.alone

SIZE, BLOCK = 1024, 128  # 8 x 8 blocks


def random_matrix(seed):
    rng = da.random.default_rng(seed)
    return rng.standard_normal((SIZE, SIZE), chunks=BLOCK, dtype="float32")


def traffic(client, compute):
    """Bytes that each worker receives while a result is computed."""
    reset_received_bytes(client)
    result = compute().persist()
    wait(result)
    return result, received_bytes(client)


def test_a_product_moves_the_2d_bound_and_a_third_of_dask_s():
    with multimm.cluster.start(workers=4, memory_limit="1GB") as client:
        a, b = random_matrix(1), random_matrix(2)
        plan = multimm.plan(a, b, blocks=BLOCK, slabs=BLOCK)
        assert tuple(plan.grid) == (2, 2, 1)
        c, ours = traffic(client, lambda: multimm.matmul(a, b, blocks=BLOCK, slabs=BLOCK))
        # On a 2 x 2 grid every worker uses half of A and of B, and keeps a quarter of each.
        bound = 2 * SIZE * SIZE * 4 * (1 / 2 - 1 / 4)
        assert len(ours) == 4
        assert max(ours.values()) <= 1.05 * bound
        assert plan.received == dict.fromkeys(range(4), bound)
        assert sum(ours.values()) <= 1.05 * plan.bytes_received
        _, theirs = traffic(client, lambda: da.matmul(random_matrix(3), random_matrix(4)))
        assert sum(theirs.values()) >= 3 * sum(ours.values())
        assert multimm.verify(a, b, c)
        x, y = da.compute(a, b)
        assert np.abs(c.compute() - x @ y).max() < 1e-3
