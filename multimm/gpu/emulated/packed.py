"""Packed operands: what kernels/split_pack.cu makes of a float32 matrix, as a value.

A `PackedBlock` checks what it is made of, wherever it is made: also after a journey between
workers or to disk. Nothing here packs; CuPy is imported where something is launched.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from multimm.errors import ArrayTypeError, OptionError, ShapeError
from multimm.gpu.arch import RESIDUAL_CAP
from multimm.gpu.arrays import is_cupy
from multimm.gpu.emulated.configs import PARTS, ROW_ALIGN, SLAB, SPLIT_K
from multimm.gpu.runtime.launch import kernel_for
from multimm.shapes import check_operands

Array = Any

_THREADS = 256


class Residuals(NamedTuple):
    """Elements that the parts have 0 for, in any order; all on the block's device."""

    places: Array  #: row * 2^32 + k; uint64, shape (n,)
    values: Array  #: float32, shape (n,)


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """One operand of a product, ready for kernels/sgemm_split.cu.

    Parameters
    ----------
    rows, k : int
        op(A) is rows x k, op(B) k x rows.
    side : {"a", "b"}
    scheme : {"float32", "tf32"}
        The precision that it was packed for: FP16 high and low parts, or high parts alone.
    tiles : cupy.ndarray of float16, shape (R / 64, S, parts, 64, 64), or None
        R is `rows` rounded up to 128, S = ceil(k / 64). None in a block that keeps its source.
    exponents : cupy.ndarray of int32, shape (R,), or None
    nonfinite : int, optional
        How many elements of the source are infinite or no numbers.
    uncarried : int, optional
        How many others the parts do not carry: not 0, but less than 2^-28 of the largest of their
        row of op(A) or column of op(B), some only less than 2^-29 of it.
    residuals : Residuals, optional
        These, if there are any.
    raw : cupy.ndarray of float32, of the block's shape, optional
        The source, in place of tiles: it has elements that are not finite, or more than
        `RESIDUAL_CAP` that are not carried, or a short k. Any strides.

    Raises
    ------
    OptionError, ShapeError, ArrayTypeError
        Parts that do not make up a block, such as after a damaged transport.
    """

    rows: int
    k: int
    side: str
    scheme: str
    tiles: Array = None
    exponents: Array = None
    nonfinite: int = 0
    uncarried: int = 0
    residuals: Residuals | None = None
    raw: Array = None

    def __post_init__(self) -> None:
        _check_header(self)
        if self.raw is not None:
            _check_part("raw", self.raw, np.float32, self.shape)
            _require(self.tiles is self.exponents is self.residuals is None,
                     "it has both its source and packed tiles")  # fmt: skip
            return
        _require(self.nonfinite == 0, f"{self.nonfinite} elements are not finite: use its source")
        height = -(-self.rows // ROW_ALIGN) * ROW_ALIGN
        tiles = (height // SLAB, -(-self.k // SLAB), PARTS[self.scheme], SLAB, SLAB)
        _check_part("tiles", self.tiles, np.float16, tiles)
        _check_part("exponents", self.exponents, np.int32, (height,))
        count = 0 if self.residuals is None else len(self.residuals.values)
        _require(count == self.uncarried <= RESIDUAL_CAP,
                 f"it has {count} residuals of {self.uncarried}")  # fmt: skip
        if self.residuals is not None:
            for name, part, dtype in zip(
                Residuals._fields, self.residuals, (np.uint64, np.float32), strict=True
            ):
                _check_part(name, part, dtype, (count,))
        devices = {name: x.data.device_id for name, x in self.arrays().items()}
        _require(len(set(devices.values())) == 1, f"its parts lie on several devices: {devices}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle through the constructor, so that what arrives is checked."""
        return PackedBlock, tuple(getattr(self, field.name) for field in fields(self))

    def arrays(self) -> dict[str, Array]:
        """Return all device arrays of the block by name."""
        given = {"tiles": self.tiles, "exponents": self.exponents, "raw": self.raw}
        if self.residuals is not None:
            given |= self.residuals._asdict()
        return {name: x for name, x in given.items() if x is not None}

    @property
    def refused(self) -> str | None:
        """Why it keeps its source, or None."""
        if self.raw is None:
            return None
        why = why_refused(self.side, self.nonfinite, self.uncarried)
        return why or f"k = {self.k} is shorter than {SPLIT_K}"

    @property
    def shape(self) -> tuple[int, int]:
        """Of op(A) or op(B)."""
        return (self.rows, self.k) if self.side == "a" else (self.k, self.rows)

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32, which the parts stand for."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory: those of the source, a little more for "float32"."""
        return sum(int(x.nbytes) for x in self.arrays().values())

    @property
    def device_id(self) -> int:
        """The device that holds it."""
        return int((self.tiles if self.raw is None else self.raw).data.device_id)

    def unpack(self) -> Array:
        """Return op(A) or op(B) as float32, on the block's device.

        Returns
        -------
        cupy.ndarray of float32, of the block's shape
            New memory with contiguous rows (side "a") or columns (side "b"), or `raw` itself.
            To 22 bits or better, "tf32" to 11; exact where residuals are listed.
        """
        if self.raw is not None:
            return self.raw
        import cupy

        with cupy.cuda.Device(self.device_id):
            y = cupy.empty((self.rows, self.k), np.float32)
            if y.size:
                self._unpack_into(y)
        return y if self.side == "a" else y.swapaxes(-1, -2)

    def _unpack_into(self, y: Array) -> None:
        pointers = (self.tiles.data.ptr, self.exponents.data.ptr, y.data.ptr)
        blocks = self.tiles.shape[0] * self.tiles.shape[1]
        self._launch("unpack", blocks, (self.rows, self.k, *pointers))
        if self.residuals is not None:
            lists = [x.data.ptr for x in self.residuals]
            blocks = -(-self.uncarried // _THREADS)
            sizes = self.uncarried, self.k
            self._launch("put_residuals", blocks, (*sizes, *lists, y.data.ptr))

    def _launch(self, entry: str, blocks: int, arguments: tuple[int, ...]) -> None:
        defines = (("PARTS", PARTS[self.scheme]),)
        kernel = kernel_for(self.device_id, "split_unpack.cu", entry, defines)
        kernel((blocks, 1, 1), (_THREADS, 1, 1), arguments)


def why_refused(side: str, nonfinite: int, uncarried: int) -> str | None:
    """Return why an operand with so many elements of these kinds is not packed, or None."""
    if nonfinite:
        return f"operand {side} has {nonfinite} elements that are not finite"
    if uncarried > RESIDUAL_CAP:
        return f"operand {side} has {uncarried} elements that FP16 parts do not carry"
    return None


def check_pair(a: Any, b: Any) -> None:
    """Check that two packed operands can be multiplied with each other.

    Parameters
    ----------
    a, b : PackedBlock

    Raises
    ------
    ArrayTypeError, OptionError, ShapeError
        Something else than a packed operand, or one of another side, scheme, k or device.
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, PackedBlock):
            raise ArrayTypeError(
                f"{name} is a {type(x).__module__}.{type(x).__qualname__}: pack it first, with "
                f'multimm.gpu.pack({name}, side="{name}")'
            )
        if x.side != name:
            raise OptionError(f'{name} was packed as operand "{x.side}": pack it for side "{name}"')
    if a.scheme != b.scheme:
        raise OptionError(
            f"a was packed for {a.scheme} and b for {b.scheme}: both must be for one precision"
        )
    check_operands((a.rows, a.k), (b.k, b.rows))
    if a.device_id != b.device_id:
        raise ArrayTypeError(
            f"a lies on device {a.device_id}, b on device {b.device_id}: move them to one"
        )


def check_promise(
    a: Any, b: Any, precision: str, trans_a: bool = False, trans_b: bool = False
) -> bool:
    """Return whether an operand was packed before, and check that it was for this precision.

    Whether it fits the other operand is checked where it is multiplied.
    """
    found = False
    for name, x, trans in (("a", a, trans_a), ("b", b, trans_b)):
        if not isinstance(x, PackedBlock):
            continue
        if x.scheme != precision:
            raise OptionError(
                f"{name} was packed for {x.scheme!r}: pass precision={x.scheme!r}, or pack it with "
                f"scheme={precision!r} if that is not 'ieee'"
            )
        if trans:
            raise OptionError(f"{name} was packed as op({name.upper()}): leave out trans_{name}")
        found = True
    return found


def _check_header(block: PackedBlock) -> None:
    if block.side not in ("a", "b"):
        raise OptionError(f'side is {block.side!r}: it must be "a" or "b"')
    if block.scheme not in PARTS:
        raise OptionError(f"scheme is {block.scheme!r}: it must be one of {', '.join(PARTS)}")
    for name in ("rows", "k", "nonfinite", "uncarried"):
        size = getattr(block, name)
        if type(size) is not int or size < 0:
            raise ShapeError(f"packed block: {name} is {size!r}, but must be an integer from 0 on")


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ArrayTypeError(f"packed block: {sentence}")


def _check_part(name: str, x: Array, dtype: type, shape: tuple[int, ...]) -> None:
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    _require(is_cupy(x), f"{name} is a {kind}, not a CuPy array")
    _require(x.dtype == dtype, f"{name} has dtype {x.dtype}, but must be {np.dtype(dtype)}")
    if x.shape != shape:
        raise ShapeError(f"packed block: {name} has shape {x.shape}, but must have {shape}")
    contiguous = name == "raw" or bool(x.flags.c_contiguous)
    _require(contiguous, f"{name} has strides {x.strides}, but must be contiguous")


def register_with_dask() -> None:
    """Tell Dask what a packed block is, where distributed is in use.

    A worker to which one travels has packed none, and knows no more of it than this module: it is
    imported when the block's type is unpickled.
    """
    if "distributed" in sys.modules:
        from multimm.gpu.emulated.serialization import register

        register()


register_with_dask()
