"""One verified product on a cluster that runs already: the last step of every recipe.

    python product.py tls://10.0.0.1:8786 --workers 16 --size 65536

Prints the plan, the seconds and what the check found; ends with an error if the product is wrong.
TLS credentials come from Dask's configuration (see tls/). With GPU workers CuPy must be installed
here, too, but no GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import dask.array as da
from distributed import Security, wait

import multimm


def block(seed: int, *, gpu: bool, block_info: Any = None) -> Any:
    """Normal numbers, drawn where the block is to lie; no numbers without `block_info`."""
    if gpu:
        import cupy as xp
    else:
        import numpy as xp
    if block_info is None:
        return xp.empty((0, 0), "float32")
    place = block_info[None]
    generator = xp.random.default_rng((seed, *place["chunk-location"]))
    return generator.standard_normal(place["chunk-shape"], dtype="float32")


def matrix(size: int, seed: int, *, gpu: bool) -> da.Array:
    """A lazy square matrix in 8 x 8 blocks: blocks of a lost worker are drawn again."""
    edges = da.core.normalize_chunks(-(-size // 8), (size, size))
    if gpu:
        import cupy as xp
    else:
        import numpy as xp
    return da.map_blocks(
        block, seed, gpu=gpu, chunks=edges, dtype="float32", meta=xp.empty((0, 0), "float32")
    )


def main() -> None:
    """Connect, plan, multiply, verify."""
    parser = argparse.ArgumentParser(description="One verified product on a running cluster.")
    parser.add_argument("address", help="the scheduler: tls://host:8786, ucxx://..., tcp://...")
    parser.add_argument("--workers", type=int, default=1, help="how many to wait for")
    parser.add_argument("--size", type=int, default=8192, help="edge of the matrices")
    options = parser.parse_args()

    encrypted = options.address.startswith("tls://")
    with multimm.cluster.connect(
        options.address, timeout=60, security=Security() if encrypted else None, overlap=True
    ) as client:
        client.wait_for_workers(options.workers, timeout=600)
        spec = multimm.cluster.describe(client)
        gpu = spec is not None and all(device.kind == "gpu" for device in spec.devices)
        a, b = (matrix(options.size, seed, gpu=gpu).persist() for seed in (0, 1))
        wait([a, b])
        print(multimm.plan(a, b))
        started = time.perf_counter()
        c = multimm.matmul(a, b).persist()
        wait(c)
        print(f"computed in {time.perf_counter() - started:.3g} s, the first on this cluster")
        found = multimm.verify(a, b, c)
        print(found)
    if not found:
        sys.exit(1)


if __name__ == "__main__":
    main()
