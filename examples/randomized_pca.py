"""The leading principal components of a tall matrix, with Dask's own randomized SVD on multimm."""

from typing import Any

import dask.array as da
import numpy as np
from dask.array.linalg import svd_compressed
from sklearn.decomposition import PCA

import multimm

SAMPLES, FEATURES, COMPONENTS = 20_000, 200, 5


def main() -> None:
    rng: Any = da.random.default_rng(0)  # pyright believes that chunks are text
    hidden = rng.standard_normal((SAMPLES, COMPONENTS), chunks=(2000, -1)) * [9, 7, 5, 4, 3]
    directions = rng.standard_normal((COMPONENTS, FEATURES), chunks=-1)
    x = hidden @ directions + rng.standard_normal((SAMPLES, FEATURES), chunks=(2000, -1))
    x = x.astype("float32").persist()

    with multimm.accelerate():  # products of Dask's algorithms are multimm's
        centred = x - x.mean(axis=0)
        _, s, components = svd_compressed(centred, COMPONENTS, n_power_iter=2, seed=0)
        variance, components = da.compute(s**2 / (SAMPLES - 1), components)

    expected = PCA(COMPONENTS, svd_solver="full").fit(x.compute())
    alike = np.abs((components * expected.components_).sum(axis=1))  # signs are free
    print("variances         ", variance)
    print("of scikit-learn   ", expected.explained_variance_)
    print("cosines of axes   ", alike)
    np.testing.assert_allclose(variance, expected.explained_variance_, rtol=1e-4)
    assert alike.min() > 0.9999


if __name__ == "__main__":
    with multimm.cluster.start():
        main()
