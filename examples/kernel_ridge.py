"""Kernel ridge regression: a radial kernel from one product, and a solve made of products."""

from typing import Any

import dask.array as da
import numpy as np
from dask.array.linalg import solve
from sklearn.kernel_ridge import KernelRidge

import multimm

SAMPLES, FEATURES, ALPHA, GAMMA = 3000, 20, 1, 0.05


def radial(x: da.Array, y: da.Array) -> da.Array:
    """exp(-GAMMA |x_i - y_j|^2): squares of distances are |x|^2 + |y|^2 - 2 x.y."""
    squares = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1) - 2 * multimm.matmul(x, y.T)
    kernel: da.Array = da.exp(-GAMMA * squares)
    return kernel


def main() -> None:
    rng: Any = da.random.default_rng(0)  # pyright believes that chunks are text
    x = rng.standard_normal((SAMPLES, FEATURES), chunks=(1000, -1)).persist()
    y = (da.sin(x[:, 0]) + x[:, 1] * x[:, 2]).persist()
    new = rng.standard_normal((500, FEATURES), chunks=(500, -1)).persist()

    with multimm.accelerate():
        kernel = radial(x, x) + ALPHA * da.eye(SAMPLES, chunks=1000)
        weights = solve(kernel, y, assume_a="pos").persist()
        predicted = (radial(new, x) @ weights).compute()

    model = KernelRidge(alpha=ALPHA, kernel="rbf", gamma=GAMMA).fit(x.compute(), y.compute())
    expected = model.predict(new.compute())
    print("largest difference from scikit-learn:", np.abs(predicted - expected).max())
    np.testing.assert_allclose(predicted, expected, rtol=1e-6, atol=1e-9)


if __name__ == "__main__":
    with multimm.cluster.start():
        main()
