"""What multimm makes of Dask code inside `accelerate()`, and whether Dask is itself outside."""

from __future__ import annotations

from multimm import entries

ORIGINALS = [(owner, name, getattr(owner, name)) for owner, name in entries.ENTRIES]


def untouched():
    return all(getattr(owner, name) is original for owner, name, original in ORIGINALS)


def ours(array):
    """Whether multimm made the array: one of its layers carries the name."""
    return any(layer.startswith("multimm") for layer in array.dask.layers)
