"""Packed operands: what kernels/split_pack.cu makes of a float32 matrix, as a value.

`multimm.gpu.pack` makes them. Nothing here packs; CuPy is imported where something is launched.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from multimm.errors import ArrayTypeError, OptionError, kind_of
from multimm.gpu.arch import RESIDUAL_CAP
from multimm.gpu.emulated.configs import PARTS, SPLIT_K
from multimm.gpu.runtime.launch import kernel_for
from multimm.shapes import check_operands

Array = Any

_THREADS = 256


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
    places : cupy.ndarray of uint64, shape (uncarried,), optional
        Of these, if there are any, in any order: row * 2^32 + k. The parts have 0 for them.
    values : cupy.ndarray of float32, shape (uncarried,), optional
        Of the same.
    raw : cupy.ndarray of float32, of the block's shape, optional
        The source, in place of tiles: it has elements that are not finite, or more than
        `RESIDUAL_CAP` that are not carried, or a short k. Any strides.
    """

    rows: int
    k: int
    side: str
    scheme: str
    tiles: Array = None
    exponents: Array = None
    nonfinite: int = 0
    uncarried: int = 0
    places: Array = None
    values: Array = None
    raw: Array = None

    def arrays(self) -> dict[str, Array]:
        """Return all device arrays of the block by name."""
        names = ("tiles", "exponents", "raw", "places", "values")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

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
        if self.uncarried:
            lists = self.places.data.ptr, self.values.data.ptr
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
        return f"operand {side} has over {RESIDUAL_CAP} elements that FP16 parts do not carry"
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
                f"{name} is a {kind_of(x)}: pack it first, with multimm.gpu.pack({name}, "
                f'side="{name}")'
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
            again = f", or pack it with scheme={precision!r}" if precision in PARTS else ""
            raise OptionError(
                f"{name} was packed for {x.scheme!r}: pass precision={x.scheme!r}{again}"
            )
        if trans:
            raise OptionError(f"{name} was packed as op({name.upper()}): leave out trans_{name}")
        found = True
    return found


def register_with_dask() -> None:
    """Tell Dask what a packed block is, where distributed is in use.

    A worker to which one travels has packed none, and knows no more of it than this module: it is
    imported when the block's type is unpickled.
    """
    if "distributed" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    """Register its size, and that each array travels as CuPy's do: "dask" and "cuda" frames.

    It would count as a few bytes of host memory, and travel by pickle, through the host.
    """
    from dask.sizeof import sizeof
    from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
    from distributed.protocol.serialize import register_generic

    sizeof.register(PackedBlock)(lambda block: block.nbytes)
    register_generic(PackedBlock)
    register_generic(PackedBlock, "cuda", cuda_serialize, cuda_deserialize)
    if sys.modules.get("dask_cuda"):  # as in every worker that it has started
        from dask_cuda.is_device_object import is_device_object

        is_device_object.register(PackedBlock)(lambda block: True)


register_with_dask()
