"""How chunks of a Zarr array are stored, as its metadata file says.

Zarr's specification fixes what is written; attributes of Zarr's objects change with its releases
(3.1.6 has an enumeration where 3.4.2 has a string). Whatever is not known here is left to Zarr.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Codecs of numcodecs' that decode into memory that they are given, and whose speed they have.
CODECS = {"blosc": "blosc", "gzip": "gzip", "lz4": "blosc", "zlib": "gzip", "zstd": "zstd"}
#: Data types, as version 3 of the specification calls them.
DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """Of elements in C order, all chunks alike."""

    dtype: np.dtype[Any]  #: byte order included
    chunk: tuple[int, ...]
    codec: str | None  #: a key of `CODECS`; None for elements as they are


def written(folder: str) -> Encoding | None:
    """How the chunks of the array in a local folder are stored; None if it is not known here."""
    for name, understood in (("zarr.json", _version_3), (".zarray", _version_2)):  # as Zarr looks
        try:
            with open(f"{folder}/{name}", "rb") as file:
                metadata = json.load(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
        return understood(metadata)
    return None


def _version_3(metadata: Any) -> Encoding | None:
    match metadata:
        case {
            "data_type": str(kind),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*chunk]}},
            "codecs": [serializer, *compressors],
        } if kind in DTYPES and not metadata.get("storage_transformers"):
            dtype = np.dtype(kind)
        case _:
            return None
    match serializer:
        case {"name": "bytes", "configuration": {"endian": "little" | "big" as endian}}:
            dtype = dtype.newbyteorder(endian)
        case "bytes" | {"name": "bytes"} if dtype.itemsize == 1:
            pass
        case _:
            return None
    match compressors:
        case []:
            return Encoding(dtype, tuple(chunk), None)
        case [{"name": "blosc" | "gzip" | "zstd" as codec}]:
            return Encoding(dtype, tuple(chunk), codec)
        case [{"name": str(codec)}] if codec in {f"numcodecs.{known}" for known in CODECS}:
            return Encoding(dtype, tuple(chunk), codec.removeprefix("numcodecs."))
    return None


def _version_2(metadata: Any) -> Encoding | None:
    match metadata:
        case {"dtype": str(kind), "chunks": [*chunk], "order": "C", "compressor": compressor} if (
            kind[1:] in {np.dtype(known).str[1:] for known in DTYPES}
            and kind[0] in "<>|"
            and not metadata.get("filters")
        ):
            dtype = np.dtype(kind)
        case _:
            return None
    match compressor:
        case None:
            return Encoding(dtype, tuple(chunk), None)
        case {"id": str(codec)} if codec in CODECS:
            return Encoding(dtype, tuple(chunk), codec)
    return None
