"""Twelve lines: a cluster, two lazy matrices, the plan, the product, the check."""

from typing import Any

import dask.array as da

import multimm

if __name__ == "__main__":
    with multimm.cluster.start():  # all GPUs of this host, or CPU workers
        rng: Any = da.random.default_rng(0)  # pyright believes that chunks are text
        a = rng.standard_normal((4000, 6000), chunks=1000, dtype="float32")
        b = rng.standard_normal((6000, 5000), chunks=1500, dtype="float32")
        print(multimm.plan(a, b))  # the dry run
        c = multimm.matmul(a, b).persist()  # an ordinary Dask array
        print(multimm.verify(a, b, c))  # O(n^2), with an error bound
