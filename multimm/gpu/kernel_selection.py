"""Which kernel computes a product at the precision that was promised.

Pure arithmetic, and a note of what was chosen last.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias, get_args

from multimm.errors import OptionError
from multimm.gpu.arch import Device
from multimm.gpu.emulated.configs import PRODUCTS, SPLIT_K, entries_for, pays, split_seconds
from multimm.gpu.simt.configs import predicted_seconds
from multimm.gpu.simt.thin import NARROW_DOT
from multimm.gpu.strides import GemmSizes

logger = logging.getLogger(__name__)

#: What may be promised: of float32 products all but the last, which is for `DOUBLE`.
Precision: TypeAlias = Literal["float32", "ieee", "tf32", "float64"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
SINGLE: tuple[Precision, ...] = PRECISIONS[:-1]
#: Dtypes of sums, and of results, of which "float64" can be promised.
DOUBLE = ("float64", "complex128")
#: Kernels, by the names of their files.
FFMA, SPLIT = "sgemm_ffma", "sgemm_split"

#: From so many rows and columns on, the tensor cores always win but where k is about as short as
#: they take it, and then lose no more than a launch does.
LARGE = 1024

#: Multiplications of a matrix in a stack from which on each is multiplied by itself: 2048 cubed
#: takes an H200 some 120 us on the tensor cores, 320 with FP32 multiply-adds, and its host about as
#: long to launch as the former.
ALONE = 2**33


class Choice(NamedTuple):
    """A kernel and why it was taken."""

    kernel: str  #: "sgemm_ffma"; "sgemm_split", whichever tensor cores the GPU has; others
    precision: str  #: that was promised, or "exact"
    reason: str  #: one line


def check_precision(precision: object, allowed: tuple[str, ...] = PRECISIONS) -> None:
    """Raise `OptionError` for a precision that does not exist."""
    if not isinstance(precision, str) or precision not in allowed:  # an array is not compared
        names = ", ".join(map(repr, allowed))
        raise OptionError(f"precision={precision!r}: allowed are {names}")


def check_held(precision: str, *dtypes: str) -> None:
    """Raise `OptionError` for "float64" of sums, or a result, of dtypes that cannot keep it."""
    if precision != "float64":
        return
    for name in dtypes:
        if name not in DOUBLE:
            wide = DOUBLE[name.startswith("complex")]
            raise OptionError(
                f"precision='float64' of a {name} product: it is for float64 and complex128; ask "
                f"for dtype='{wide}', convert the operands, or leave precision out"
            )


@functools.lru_cache(maxsize=1024)
def choose_kernel(
    sizes: GemmSizes, precision: Precision, device: Device, alpha_is_0: bool = False
) -> Choice:
    """Return the fastest kernel that keeps the promise, as far as sizes tell.

    `SPLIT` of a stack: each matrix is so large that it keeps the tensor cores busy alone.

    Parameters
    ----------
    sizes : GemmSizes
    precision : {"float32", "ieee", "tf32"}
    device : Device

    Returns
    -------
    Choice
    """
    m, n, k = sizes.m, sizes.n, sizes.k
    if sizes.batch > 1 and m * n * k >= ALONE:
        alone = choose_kernel(replace(sizes, batch=1), precision, device, alpha_is_0)
        if alone.kernel == SPLIT:
            return alone
    reason = _why_not(sizes, precision, device)
    if reason is not None:
        return Choice(FFMA, precision, reason)
    if alpha_is_0:
        return Choice(FFMA, precision, "alpha is 0")
    if min(m, n) >= LARGE:
        return Choice(SPLIT, precision, f"{m} rows and {n} columns keep the tensor cores busy")
    ours = split_seconds(m, n, k, PRODUCTS[precision], device)
    plain = predicted_seconds(sizes, device)
    kernel = SPLIT if ours < plain else FFMA
    return Choice(
        kernel, precision,
        f"{ours * 1e6:.0f} us predicted on the tensor cores, packing included, "
        f"{plain * 1e6:.0f} us with FP32 multiply-adds",
    )  # fmt: skip


def choose_packed(sizes: GemmSizes, scheme: str, refused: str | None, device: Device) -> Choice:
    """Return the kernel for two packed operands: they are unpacked where it is `FFMA`.

    Parameters
    ----------
    sizes : GemmSizes
    scheme : {"float32", "tf32"}
        That they were packed for.
    refused : str or None
        Why one of them keeps its source.
    device : Device
    """
    empty = 0 in (sizes.m, sizes.n, sizes.k)
    if refused is None and not empty and entries_for(device.limits):
        return Choice(SPLIT, scheme, "the operands are packed")
    none = "there is nothing to multiply" if empty else "the GPU has no tensor cores for it"
    return Choice(FFMA, scheme, refused or none)


def _why_not(sizes: GemmSizes, precision: str, device: Device) -> str | None:
    if precision == "ieee":
        return "FP32 multiply-adds were asked for"
    if not pays(PRODUCTS[precision], device):
        capability = device.limits.capability / 10
        return f"compute capability {capability}: its tensor cores are no faster for {precision}"
    if sizes.batch != 1:
        return "a stack of products"
    if sizes.k < SPLIT_K:
        return f"k = {sizes.k} is shorter than {SPLIT_K}"
    if min(sizes.m, sizes.n) <= NARROW_DOT:
        return f"the result has {min(sizes.m, sizes.n)} rows or columns"
    return None


#: Says how a product was computed after all.
WhatRan = Callable[[], Choice]


class _Noted(threading.local):
    """What the last product of a thread ran with."""

    choice: Choice | None = None
    what_ran: WhatRan | None = None


_noted = _Noted()


def note(choice: Choice, what_ran: WhatRan | None = None) -> None:
    """Keep a choice for `last_choice`, and log it.

    Parameters
    ----------
    choice : Choice
    what_ran : callable, optional
        Returns what the data made of the choice. It is called when somebody asks, for it waits for
        the GPU.
    """
    _noted.choice, _noted.what_ran = choice, what_ran
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s for %s: %s", *choice)


def last_choice() -> Choice | None:
    """Return what the last product of this thread ran with that our kernels computed, or None.

    What the tensor cores compute depends on the data: then this waits for the product. Products of
    cuBLAS, such as small ones of float64, are not noted.

    Returns
    -------
    Choice or None
        `kernel` (``"sgemm_ffma"``; on tensor cores ``"sgemm_split"``, ``"byte_mma"`` for integers,
        and ``"residues"`` for float64 and complex numbers), the `precision` that was promised, or
        ``"exact"``, and the `reason`, one line.
    """
    if _noted.what_ran is not None:
        _noted.choice, _noted.what_ran = _noted.what_ran(), None
    return _noted.choice
