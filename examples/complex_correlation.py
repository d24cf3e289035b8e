"""Correlations of complex signals of many antennas: x.conj().T @ x."""

from typing import Any

import dask.array as da
import numpy as np

import multimm

SAMPLES, ANTENNAS = 40_000, 300


def main() -> None:
    rng: Any = da.random.default_rng(0)  # pyright believes that chunks are text

    def normal(shape: tuple[int, int], chunks: tuple[int, int]) -> da.Array:
        parts = (rng.standard_normal(shape, chunks=chunks, dtype="float32") for _ in "ri")
        made: da.Array = da.map_blocks(
            lambda re, im: re + np.complex64(1j) * im, *parts, dtype="complex64"
        )
        return made

    source = normal((SAMPLES, 4), (4000, 4))
    gains = normal((4, ANTENNAS), (4, ANTENNAS))
    x = (source @ gains + normal((SAMPLES, ANTENNAS), (4000, ANTENNAS))).persist()

    visibilities = multimm.matmul(x.conj().T, x)
    power = da.sqrt(da.diagonal(visibilities).real)
    correlation = (visibilities / power[:, None] / power[None, :]).compute()

    signals = x.compute().astype("complex128")
    expected = signals.conj().T @ signals
    scale = np.sqrt(expected.diagonal().real)
    expected = expected / scale[:, None] / scale
    print("largest difference from NumPy:", np.abs(correlation - expected).max())
    np.testing.assert_allclose(correlation, expected, atol=2e-5)


if __name__ == "__main__":
    with multimm.cluster.start():
        main()
