"""Matrix files written and read with each format's own library, not with ours."""

from __future__ import annotations

import os

import h5py
import numpy as np
import zarr

from multimm import io

FORMATS = ["npy", "zarr", "h5"]
OLD = np.arange(12.0).reshape(4, 3)
NEW = -OLD


def put(path, array, **options):
    """Write a file with the format's own library, not with ours."""
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".zarr":
        options.setdefault("chunks", array.shape)
        zarr.create_array(store=path, data=array, **options)
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("M", data=array, **options)
    return path


def get(path):
    """Read a file with the format's own library, not with ours."""
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".zarr":
        return zarr.open_array(path, mode="r")[:]
    with h5py.File(path) as file:
        return file["C"][:]


def read(path, **how):
    """What ours reads."""
    return io.open_array(path, **how).compute(scheduler="sync")


def names(folder):
    return sorted(os.listdir(folder))
