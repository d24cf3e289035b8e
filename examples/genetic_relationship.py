"""A genetic relationship matrix from genotypes of one byte each, summed exactly (VanRaden 2008)."""

from typing import Any

import dask.array as da
import numpy as np

import multimm

PEOPLE, MARKERS = 1500, 20_000


def main() -> None:
    rng: Any = da.random.default_rng(0)  # pyright believes that chunks are text
    # How many copies of the rarer allele each person has: 0, 1 or 2.
    chance = rng.uniform(0.05, 0.5, MARKERS, chunks=2000)
    copies = rng.uniform(size=(PEOPLE, MARKERS, 2), chunks=(500, 2000, 2)) < chance[:, None]
    x = copies.sum(axis=2, dtype="int8").persist()

    # (X - 2p)(X - 2p)' without a centred copy, which would be eight times as large: the product
    # of bytes is exact in int32, and the rest are sums of rows.
    products = multimm.matmul(x, x.T, dtype="int32")
    frequency = x.mean(axis=0) / 2
    weighted = (x * (2 * frequency)).sum(axis=1)
    centred = products - weighted[:, None] - weighted[None, :] + (4 * frequency**2).sum()
    relationship = (centred / (2 * (frequency * (1 - frequency)).sum())).compute()

    genotypes = x.compute().astype("float64")
    p = genotypes.mean(axis=0) / 2
    z = genotypes - 2 * p
    expected = z @ z.T / (2 * (p * (1 - p)).sum())
    print("mean of the diagonal:", relationship.diagonal().mean())
    print("largest difference from NumPy:", np.abs(relationship - expected).max())
    np.testing.assert_allclose(relationship, expected, atol=1e-9)


if __name__ == "__main__":
    with multimm.cluster.start():
        main()
