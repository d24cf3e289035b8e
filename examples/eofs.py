"""Empirical orthogonal functions of a field in xarray: patterns that explain most variance."""

from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

import multimm

TIMES, LAT, LON, MODES = 3000, 20, 40, 3


def field() -> xr.DataArray:
    rng: Any = da.random.default_rng(0)  # pyright believes that chunks are text
    noise = rng.standard_normal((TIMES, LAT, LON), chunks=(500, LAT, LON), dtype="float32")
    x = xr.DataArray(noise, dims=("time", "lat", "lon"))
    for mode in range(1, MODES + 1):
        wave = np.sin(np.arange(TIMES) / 7 / mode), np.cos(np.arange(LAT) * mode / 6)
        x = x + xr.DataArray(wave[0], dims="time") * xr.DataArray(wave[1] * (9 - mode), dims="lat")
    return x.astype("float32").persist()


def main() -> None:
    x = field()
    with multimm.accelerate() as report:
        anomaly = (x - x.mean("time")).stack(place=("lat", "lon"), create_index=False)
        # The covariance of all places with each other: one product over time.
        covariance = xr.dot(anomaly, anomaly.rename(place="other"), dim="time") / (TIMES - 1)
        values, patterns = np.linalg.eigh(covariance.compute().values.astype("float64"))
    print(report)
    values, patterns = values[::-1][:MODES], patterns[:, ::-1][:, :MODES]

    flat = anomaly.values.astype("float64")
    _, s, rows = np.linalg.svd(flat, full_matrices=False)
    print("variance explained:", values / (flat**2).sum() * (TIMES - 1))
    np.testing.assert_allclose(values, s[:MODES] ** 2 / (TIMES - 1), rtol=1e-4)
    assert np.abs((patterns * rows[:MODES].T).sum(axis=0)).min() > 0.9999


if __name__ == "__main__":
    with multimm.cluster.start():
        main()
