"""Freivalds' check of a matrix product with an error bound: right or wrong, without computing A B.

With random signs X (n rows, a few columns) the check compares C X with alpha A (B X) + beta C0 X:
three thin products. Rounding makes the two differ even where C is right, so each row of the
difference is held against what the contract of `multimm.checks.rule` allows its elements, e:

* *certain*: the signs are independent, so by Hoeffding's inequality row i of the difference
  exceeds t ||e[i, :]|| with probability at most 2 exp(-t^2 / 2), whatever the rounding errors.
  t is set so that one right product in 10^12 would be called wrong. |A| times the norms of
  B's rows bounds ||e[i, :]||, so |A| |B| is never formed;
* *sharp*: rounding errors mostly cancel and grow as sqrt(k), not as k (N. Higham and T. Mary,
  SIAM J. Sci. Comput. 41, 2019, A2815). A row above it is not wrong yet, it is suspect;
* *apart*: a row that differs far more than most rows of its block does is worth a second look
  as well, however far below the bounds all of them are;
* *elementwise*: the worst suspects, then those apart, are recomputed in float64 and every
  element is held against its own e. That decides, and names the element.

Integers have no bounds. They wrap around, so C is right or wrong in the ring of integers modulo
2^bits. Vectors are drawn from all of it, and both sides have to be equal. An error e of one element
vanishes beside a random number with probability 2^(z - bits), where e ends in z zero bits: 1/2 a
vector at most, for an error of 2^(bits - 1), and 2^-bits for an odd one. A vector of residues
modulo a prime tells in which rows C is right modulo 2^bits alone. Where a C of floats holds sums of
narrow integers, signs do: whole numbers below 2^53 round nowhere, and each element must be exact.

Sums of constant or one-signed data may round with a bias that makes every row suspect. Rows that
are not recomputed then pass while they keep the certain bound, and `detects` grows to match.

Sources: R. Freivalds, "Probabilistic machines can use less running time", IFIP Congress 1977;
W. Hoeffding, J. Amer. Statist. Assoc. 58, 1963.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from multimm.checks.judge import OPEN_ROWS
from multimm.checks.operands import Job, draws, prepare
from multimm.checks.sweep import (
    Found,
    Row,
    hidden_columns,
    hidden_places,
    recompute,
    sweep,
    transposed,
)
from multimm.contractions.matrices_of import matrices_of
from multimm.display import html
from multimm.errors import OptionError
from multimm.gpu.kernel_selection import Precision, check_precision
from multimm.operands import check_waits, is_lazy, plain_scalar
from multimm.shapes import check_flags

#: What is said where no element of C was compared with a number.
UNSEEN = "nothing could be checked: no element of c can be told to be right, all are non-finite"
#: Rows of a bool product that are recomputed: an OR of ANDs has no linear sketch (arbitrary).
BOOL_ROWS = 64


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`; true in a boolean context where the product is right.

    Attributes
    ----------
    ok : bool
        Something was checked, and nothing was found outside its error bound.
    worst : float
        The largest difference found, in units of its bound; above 1 where `c` is wrong.
    detects : float
        An error of more than this in any one element is found with a probability of at least
        ``1 - 2**-rounds``, whatever the other elements are. Infinite where some elements could not
        be looked at. 0 for integers, and for floats that hold exact sums of integers; 1 for bool.
    largest : float
        The largest finite absolute value in C, to read `detects` against; 0 for integers. That of
        a complex number beyond float64 counts as float64's largest.
    rounds, seed : int
        Random vectors, and the seed they were drawn with.
    suspects : int
        Rows of C that differ by more than rounding usually causes, right or wrong.
    recomputed : int
        Rows that were recomputed and compared element by element.
    unchecked : int
        Elements of C that nothing was said about: see the notes of `verify`.
    reason : str
        What was found, in one sentence.
    """

    ok: bool
    worst: float
    detects: float
    largest: float
    rounds: int
    seed: int
    suspects: int
    recomputed: int
    unchecked: int
    reason: str

    def __bool__(self) -> bool:
        """`ok`."""
        return self.ok

    def __str__(self) -> str:
        """One line for a reader."""
        rest = f"; {self.unchecked} elements were not checked" if self.unchecked else ""
        verdict = "verified" if self.ok else "WRONG" if self.worst > 1 else "NOT VERIFIED"
        return f"{verdict} ({self.rounds} rounds): {self.reason}{rest}"

    def _repr_html_(self) -> str:
        share = min(self.worst, 1.0) if self.worst >= 0 else 1.0
        figures = (
            ("an error is found in one element above", f"{self.detects:.3g}"),
            ("largest element", f"{self.largest:.3g}"),
            ("random vectors", f"{self.rounds}"),
            ("rows that differ more than usual", f"{self.suspects}"),
            ("rows recomputed", f"{self.recomputed}"),
            ("elements not checked", f"{self.unchecked}"),
        )
        worst = ("largest difference", share, f"{self.worst:.2g} of its bound")
        return html.page(str(self), html.bar("", [worst], 1.0), html.table(figures))


def verify(
    a: Any,
    b: Any,
    c: Any,
    *more: Any,
    axes: Any = None,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: Any = 1,
    beta: Any = 0,
    c0: Any = None,
    dtype: Any = None,
    precision: Precision = "float32",
    rounds: int = 20,
    seed: int = 0,
) -> Verification:
    """Check ``c == alpha * op(a) @ op(b) + beta * c0`` at the cost of reading them once.

    A right product fails with a probability below 1e-12. A product with an element that is off
    by more than `Verification.detects` passes with a probability of at most ``2**-rounds``. Of
    integers no difference passes as rounding, and a right product never fails.

    ``verify("txy,tuv->xyuv", a, b, c)`` checks what `multimm.einsum` made of two operands, and
    ``verify(a, b, c, axes=2)`` what `multimm.tensordot` did.

    Parameters
    ----------
    a, b : array_like or dask.array.Array
        Operands of shape (..., m, k) and (..., k, n) after `trans_a` and `trans_b`, which swap
        the last two axes, or 1-D, with the broadcasting of `numpy.matmul`; any numeric dtype;
        on the host (NumPy), on a GPU (CuPy) or in Dask blocks of either.
    c : array_like or dask.array.Array
        The product to check, of the shape that `numpy.matmul` gives. Its dtype sets the
        rounding that is allowed, see the notes; integers are checked exactly, modulo 2**bits.
    *more : array
        `c`, where subscripts, a string, are before all. They say a product of two operands: of sums
        in several steps, check one after the other. What is wrong is named by its place in the
        product of matrices.
    axes : int or two sequences of int, optional
        Of `tensordot`.
    trans_a, trans_b : bool
        Whether `a`, `b` enter transposed.
    alpha, beta : scalar
        Finite, and integral where `c` holds integers. ``alpha=0`` reads neither `a` nor `b`,
        ``beta=0`` does not read `c0`.
    c0 : array_like, optional
        What was added; its shape broadcasts to the one of `c`. Where `gemm` was given a `c`, give
        it here with ``beta=0`` too: its dtype counts.
    dtype : dtype, optional
        The ``dtype=`` that the product was asked for with, which is that of `c`. Of narrow integers
        no sum is rounded then: a float `c` is held to the rounding of its own elements, see the
        notes.
    precision : {"float32", "ieee", "tf32", "float64"}
        What was asked of the product. ``"tf32"`` allows a product of float32, per element, 2^-9 and
        twice the rounding of FP32 sums: 2^-9 + 2 k u of abs(A) @ abs(B). Of complex64 it allows
        three times that, as of all complex numbers, whose parts are sums of 2 k products. It
        changes nothing where the result has another dtype. ``"float64"`` is refused unless `c` is
        float64 or complex128, and changes nothing else.
    rounds : int
        Random vectors, all used in one pass.
    seed : int
        Of the random vectors: the same call gives the same answer.

    Returns
    -------
    Verification
        ``bool(result)`` is the answer, ``str(result)`` one line for a reader.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError, OptionError
        For operands that do not fit together, before anything is computed.
    DTypeError
        From tasks, for long doubles beyond the range of float64, in which the check computes.
    ClusterError
        For Dask operands in the event loop of an asynchronous client, where nothing may wait.

    Notes
    -----
    This finds products that are wrong, not ones that are less precise than they could be: the
    errors of single-pass TF32, say, are within an FP32 dot product's worst case for a large k. For
    a k below some thousand they are not: say what was asked with `precision`.

    Dask operands are read block by block on the active scheduler; only sums per row travel. That
    is one pass. A second one reads a few rows where rounding does not explain a difference, and
    two more are made where `b` holds non-finite values; a lazy `c` is computed in each pass.

    Elements of C that a NaN or an infinity in `a` or `b` reaches must be non-finite; all others
    are checked as usual. Where no other is left, nothing could be checked: that is no pass. Up to
    64 such rows and 64 such columns are recomputed, and must hold the NaN and infinities of IEEE
    arithmetic (of complex numbers either); where there are more, the reason says so. An
    element may be non-finite where a sum may have overflowed on its way to a finite one.

    Of the rows where `c0` or `c` itself holds non-finite values, or where float64 overflows, 64
    are recomputed and the others counted in `Verification.unchecked`. Those with the fewest such
    values come first.

    A product of integers may wrap around, as NumPy's do: it is right modulo 2**bits, and checked in
    these numbers, without a tolerance. A wrong element passes with a probability of ``2**-rounds``
    at most, if it is off by half of the range, and of ``2**(-bits * rounds)`` if by an odd number.
    The reason says in how many rows one has wrapped around, of which one in a million is missed.

    Of bool, int8, uint8, int16 and uint16 a float `dtype` holds exact sums, rounded once. With
    `dtype`, and neither `alpha` nor `beta`, `c` is checked likewise: it holds whole numbers alone,
    and what is below 2**24 in float32, or 2**53 in float64, has to be exact. Rows with a larger
    number have the tolerance of its rounding.

    A bool product has no linear sketch: 64 random rows are recomputed and the others counted in
    `Verification.unchecked`. Is a share s of all rows wrong, it passes with ``(1 - s)**64``.

    `c` may be wider than ``a @ b``. If it is for `alpha` or `c0`, as in `gemm` and NumPy, rounding
    is allowed in what ``a @ b`` is summed in. A bool ``a @ b`` may be an OR then, and integers may
    have wrapped around: in rows where nothing else explains `c`. If more than 16 rows are such,
    these and 64 random ones are recomputed and the others counted in `Verification.unchecked`.

    If it is wider for neither, and `dtype` does not say why, `c` is held to its own dtype, which a
    float32 product that was cast to float64 does not keep; the reason says so. Check it before
    casting, cast `a` and `b`, or give the product a `dtype`.

    Examples
    --------
    >>> import numpy as np
    >>> a, b = np.eye(3, 4), np.ones((4, 5))
    >>> bool(verify(a, b, a @ b)), bool(verify(a, b, a @ b + 1e-9))
    (True, False)
    """
    check_precision(precision)
    check_flags(trans_a, trans_b)
    alpha, beta = plain_scalar(alpha), plain_scalar(beta)
    rounds, seed = draws(rounds, seed)
    if isinstance(a, str) or axes is not None or more:
        if trans_a or trans_b or c0 is not None or (alpha, beta) != (1, 0):
            raise OptionError(
                "verify of einsum or tensordot with trans_a, trans_b, alpha, beta or c0: products "
                "of matrices alone have these"
            )
        a, b, c = _matrices(a, b, c, more, axes)
    if any(map(is_lazy, (a, b, c, c0))):
        check_waits("verify", "multimm.verify, a, b, c")
    job = prepare(a, b, c, c0, (trans_a, trans_b), (alpha, beta), rounds, precision, dtype)
    if job.c.size == 0:
        return Verification(True, 0.0, 0.0, 0.0, rounds, seed, 0, 0, 0, "C has no elements")
    with np.errstate(all="ignore"):  # overflow is looked at, whatever NumPy does
        found = _verify_bool(job, seed) if job.rule.kind == "bool" else _verify_sketch(job, seed)
    hint = job.hint and not found.ok
    return replace(found, reason=f"{found.reason}; {job.hint}") if hint else found


def _matrices(a: Any, b: Any, c: Any, more: tuple[Any, ...], axes: Any) -> tuple[Any, Any, Any]:
    """Operands and result of einsum, with subscripts before them, or of tensordot, as matrices."""
    if not isinstance(a, str) and not more:
        return matrices_of(None, [a, b], c, axes)
    if not isinstance(a, str) or axes is not None or not more:
        raise OptionError(
            "verify takes a, b, c; subscripts, a, b, c; or a, b, c and axes=, as matmul, einsum "
            "and tensordot made c"
        )
    return matrices_of(a, [b, c, *more[:-1]], more[-1])


def _verify_sketch(job: Job, seed: int) -> Verification:
    found, suspects, lost = sweep(job, seed)
    hidden = None
    if found["bad_b"]:
        hidden = hidden_columns(job)
        found, suspects, lost = sweep(job, seed, hidden)
    settled = found["suspects"] + found["apart"] <= len(suspects)
    result = Verification(
        ok=not found["wrong"],
        worst=max(found["worst"], found["passed"]),
        detects=found["outlier" if settled else "sharp"],
        largest=found["largest"],
        rounds=job.rule.rounds,
        seed=seed,
        suspects=int(found["suspects"]),
        recomputed=len(suspects),
        unchecked=0,
        reason="",
    )
    if suspects:
        look = recompute(job, suspects)
        found["seen"] += look.seen
        result = _second_look(job, found, look, suspects, result)
    unseen = ""
    if result.ok:
        result, unseen = _look_at_unseen(job, int(found["lost"]), lost, hidden, result)
    if not result.ok and job.rows is not job.rule:
        return _verify_wrapped(job, found, suspects, result)
    if not result.ok:
        return result
    if job.rule.kind != "int" and not found["seen"]:
        unchecked = result.unchecked or job.rule.rows * job.rule.n
        return replace(result, ok=False, unchecked=unchecked, detects=math.inf, reason=UNSEEN)
    return replace(result, reason=_describe(job, found, result) + unseen)


def _second_look(
    job: Job, found: dict[str, float], look: Found, suspects: list[Row], result: Verification
) -> Verification:
    """The worst rows, recomputed, decide, or at least name what the sketch found wrong."""
    worst, reason = look.worst, look.reason
    if not result.ok:
        count = f"{int(found['wrong'])} rows are wrong"
        return replace(result, reason=f"{reason}; {count}" if worst > 1 else count)
    if worst > 1:
        return replace(result, ok=False, worst=worst, reason=reason)
    left = found["suspects"] > len(suspects)
    return replace(
        result,
        worst=max(worst, result.worst, found["kept"] if left else 0.0),
        # Of rows that nobody has decided, nothing is promised.
        detects=math.inf
        if found["open"] > OPEN_ROWS
        else max(look.bound, found["certain"] if left else result.detects),
        unchecked=max(0, int(found["open"]) - OPEN_ROWS) * job.rule.n,
    )


def _look_at_unseen(
    job: Job, rows: int, lost: list[Row], hidden: Any, result: Verification
) -> tuple[Verification, str]:
    """Recompute rows and columns that operands make non-finite, and say how many of them."""
    looks, told = [], []
    if rows:
        looks.append(recompute(job, lost))
        told.append((rows, "rows", len(lost)))
    if hidden is not None:
        columns = hidden_places(job, hidden)
        some = sorted(_some(columns, OPEN_ROWS, result.seed))
        looks.append(recompute(transposed(job), some, columns=True))
        told.append((len(columns), "columns", len(some)))
    if not told:
        return result, ""
    for look in looks:
        if look.worst > 1:
            return replace(result, ok=False, worst=look.worst, reason=look.reason), ""
    text = f"; a or b makes {' and '.join(f'{n} {what}' for n, what, _ in told)} non-finite"
    if any(n > some for n, _, some in told):
        text += f", of which {' and '.join(str(some) for *_, some in told)} could be checked"
    return result, text


def _verify_wrapped(
    job: Job, found: dict[str, float], suspects: list[Row], result: Verification
) -> Verification:
    """Rows that are wrong unless A B has wrapped around, or is an OR: those must be just that."""
    left = max(found["wrong"], found["suspects"]) > len(suspects)
    places = sorted({*suspects, *_random_rows(job, result.seed)}) if left else suspects
    worst, reason, *_ = recompute(replace(job, rule=job.rows), places)
    unchecked = (job.rule.rows - len(places)) * job.rule.n if left else 0
    what = "bool" if job.rows.product == "bool" else f"{job.rows.product} that wraps around"
    return replace(
        result,
        ok=worst <= 1,
        worst=worst,
        recomputed=len(places),
        unchecked=unchecked,
        reason=reason or f"a @ b is {what}: {len(places)} rows of {job.rule.rows} were recomputed",
    )


def _describe(job: Job, found: dict[str, float], result: Verification) -> str:
    shows = f"a wrong one would show with a probability of at least 1 - 2^-{result.rounds}"
    if job.rule.kind == "int":
        rows, bits = int(found["wrapped"]), job.rule.bits
        if not rows:
            return f"all integers agree; {shows}"
        return (
            f"all integers agree modulo 2^{bits}, and only so: in {rows} rows exact results are "
            f"beyond the range of {job.c.dtype}, and wrap around as NumPy's do; {shows}"
        )
    if job.rule.whole and not result.detects:
        return f"all sums of integers are exact; {shows}"
    text = f"largest difference {result.worst:.2g} of its bound; "
    if math.isfinite(result.detects):
        text += f"one element off by {result.detects:.2g} would show"
    else:
        text += "an error in what was not checked would not show"
    text += f" (largest element {result.largest:.2g})"
    if result.suspects:
        text += (
            f"; {result.suspects} rows differ more than rounding usually does, "
            f"{result.recomputed} of them were recomputed and keep the bound"
        )
    return text


def _verify_bool(job: Job, seed: int) -> Verification:
    total, places = job.rule.rows, _random_rows(job, seed)
    worst, reason, *_ = recompute(job, places)
    return Verification(
        ok=worst <= 1,
        worst=worst,
        detects=1.0,
        largest=1.0,
        rounds=job.rule.rounds,
        seed=seed,
        suspects=0,
        recomputed=len(places),
        unchecked=(total - len(places)) * job.rule.n,
        reason=reason or f"{len(places)} of {total} rows of a bool product agree",
    )


def _random_rows(job: Job, seed: int) -> list[Row]:
    chosen = sorted(_some(range(job.rule.rows), BOOL_ROWS, seed))
    return [tuple(int(at) for at in np.unravel_index(row, job.c.shape[:-1])) for row in chosen]


def _some(places: Sequence[Any], most: int, seed: int) -> list[Any]:
    """So many of some places, drawn."""
    count = len(places)
    chosen = np.random.default_rng(seed).choice(count, min(count, most), replace=False)
    return [places[int(at)] for at in chosen]
