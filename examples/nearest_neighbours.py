"""The ten nearest neighbours of each embedding, from Zarr to Zarr; similarities are never whole."""

import tempfile
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from dask.array.linalg import norm
from sklearn.neighbors import NearestNeighbors

import multimm

VECTORS, FEATURES, NEIGHBOURS = 6000, 128, 10


def main(folder: Path) -> None:
    source, target = folder / "embeddings.zarr", folder / "neighbours.zarr"
    rng: Any = da.random.default_rng(0)  # pyright believes that chunks are text
    rng.standard_normal((VECTORS, FEATURES), chunks=(1000, -1), dtype="float32").to_zarr(source)

    x = multimm.io.open_array(source)  # read block by block, when a product needs it
    x = x / norm(x, axis=1, keepdims=True)
    similarity = multimm.matmul(x, x.T)
    print(multimm.plan(x, x.T))
    # Each block of the product is reduced to its ten best right behind it, on the same worker.
    nearest = da.argtopk(similarity, NEIGHBOURS + 1, axis=1)[
        :, 1:
    ]  # the first is the vector itself
    nearest.rechunk((1000, -1)).to_zarr(target)

    vectors, found = np.asarray(multimm.io.open_array(source)), da.from_zarr(target).compute()
    brute = NearestNeighbors(n_neighbors=NEIGHBOURS + 1, algorithm="brute", metric="cosine")
    expected = brute.fit(vectors[:, :]).kneighbors(vectors[:200], return_distance=False)[:, 1:]
    same = (found[:200] == expected).mean()
    print(f"{same:.2%} of the neighbours are those of scikit-learn")
    assert same > 0.999  # two equal distances may come in either order


if __name__ == "__main__":
    with multimm.cluster.start(), tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
