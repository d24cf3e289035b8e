"""Verdicts on blocks of rows of C, from the sketches of both sides or element by element."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np

from multimm.blocks import plain
from multimm.checks.rule import PRIME, SHARP, SHRINK, U64, Rule
from multimm.checks.tasks import SIZES, STATS, checking
from multimm.gpu.arrays import to_numpy

#: What one block of rows tells: how many rows are wrong and the worst ratio of those; how many
#: are suspect, how many of these the sketch cannot settle (open), and how many others stand
#: apart; worst ratios of the rows that pass the sharp bound and of the suspects that keep the
#: certain one; the errors of one element that standing apart and the two bounds would show;
#: largest element of C; non-finite elements of B; elements that were compared with a finite number;
#: rows that A makes non-finite; rows of integers that have wrapped around.
FIELDS = (
    *("wrong", "worst", "suspects", "open", "apart", "passed", "kept"),
    *("outlier", "sharp", "certain", "largest", "bad_b"),
    *("seen", "lost", "wrapped"),
)
#: A row stands apart if it differs by this many times the median of its block, both in units
#: of the sharp bound. Arbitrary: the largest of many right rows stays below 4 on normal data,
#: and a row that is right costs no more than a second look.
OUTLIER = 16
#: Smallest number of float64, for bounds of 0: a larger one would pass what is wrong below it.
LEAST = 5e-324
#: Largest number of float64: finite complex numbers may have absolute values beyond it.
MOST = float(np.finfo(np.float64).max)
#: Rows that are recomputed because they differ much (arbitrary: one bug shows in one row as well as
#: in many); because sums over them say nothing, for they hold values that are not finite; and
#: because A makes all of them non-finite.
ROWS, OPEN_ROWS = 16, 64
#: What recomputed rows tell: the worst ratio, its row and column in the block, its difference and
#: bound; the largest bound, and how many elements were compared with a finite number.
TABLE = ("ratio", "row", "column", "error", "bound", "largest", "seen")
#: Length of a verdict: FIELDS; kinds, scores and places in the block of rows to recompute.
WIDTH = len(FIELDS) + 3 * OPEN_ROWS


class Kind(IntEnum):
    """Why a row is recomputed: the highest first, and of one kind those of the highest score."""

    NOT = 0  #: it isn't
    LOST = 1  #: A makes all of it non-finite
    SUSPECT = 2  #: it differs by more than usual
    OPEN = 3  #: the sketch cannot settle it
    WRONG = 4


@checking
def judge(sketch: Any, *others: Any, rule: Rule) -> Any:
    """The verdict on a block of rows; `others` are the product's and C0's, where they count."""
    rest = [to_numpy(other) for other in others]
    c = to_numpy(sketch)
    product = rest.pop(0) if rule.alpha else None
    c0 = rest.pop(0) if rule.beta else None
    verdict = (_judge_integers if rule.kind == "int" else _judge_rows)(c, product, c0, rule)
    return verdict.reshape((1,) * (c.ndim - 1) + (WIDTH,))


def _judge_integers(c: Any, product: Any, c0: Any, rule: Rule) -> Any:
    """Exact modulo 2**64, and so modulo 2**bits."""
    rounds = slice(rule.rounds)
    residual, apart = c[..., rounds].copy(), c[..., rule.rounds :] % PRIME
    for scalar, part in ((rule.alpha, product), (rule.beta, c0)):
        if part is not None:
            residual -= np.uint64(scalar % 2**64) * part[..., rounds]
            residue = np.uint64(scalar % int(PRIME)) * (part[..., rule.rounds :] % PRIME)
            apart += PRIME - residue % PRIME
    wrong = (residual & np.uint64(2**rule.bits - 1)).any(axis=-1).ravel()
    found = dict.fromkeys(FIELDS, 0.0) | {"wrong": wrong.sum()}
    found["wrapped"] = (apart % PRIME != 0).sum()
    found["worst"] = math.inf if wrong.any() else 0.0
    return _pack(found, np.where(wrong, Kind.WRONG, Kind.NOT), np.zeros(wrong.shape))


def _judge_rows(c: Any, product: Any, c0: Any, rule: Rule) -> Any:
    empty = np.zeros((*c.shape[:-1], rule.rounds + len(STATS)), c.dtype)
    product, c0 = empty if product is None else product, empty if c0 is None else c0
    own, added = _columns(c, STATS, rule), _columns(c0, STATS, rule)
    sizes = _columns(product, SIZES, rule)
    rounds = slice(rule.rounds)
    expected = rule.alpha * product[..., rounds] + rule.beta * c0[..., rounds]
    residual = np.abs(c[..., rounds] - expected).max(axis=-1).ravel()  # largest |C X - expected|
    sharp, certain, element, check = _bounds(own, added, sizes, rule)
    infected = sizes["bad_a"] > 0  # then all of C's row is non-finite
    broken = own["never"] + np.where(infected, own["good"], 0) > 0
    compare = ~infected & ~broken
    decided = np.isfinite(residual) & np.isfinite(certain) & (own["bad"] + added["bad"] == 0)
    suspect = compare & ~(decided & (residual <= sharp))
    wrong = broken | (compare & decided & ~(residual <= certain))
    lost = infected & ~broken
    score = residual / np.maximum(sharp, LEAST)
    ratio = np.where(decided, residual / np.maximum(certain, LEAST), 0.0)
    usual = min(OUTLIER * _median(score[compare & decided]), MOST)
    apart = compare & decided & ~suspect & (score > usual)
    # A wrong row moves the median, too: alone, or with one other, it never stands apart.
    shown = min(OUTLIER * _median(_one_more_wrong(score[compare & decided])), 1.0)
    found = {
        "wrong": wrong.sum(),
        "worst": math.inf if broken.any() else _largest(ratio[wrong]),
        "suspects": suspect.sum(),
        "open": (suspect & ~decided).sum(),
        "apart": apart.sum(),
        "passed": _largest(score[compare & ~suspect]),
        "kept": _largest(ratio[suspect & decided]),
        # One element off by d moves the difference by d, less what the check rounds.
        # Rows that the sketch cannot decide say themselves, once they are recomputed.
        "outlier": _largest(np.maximum(shown * sharp + check, element)[compare & decided]),
        "sharp": _largest(np.maximum(sharp + check, element)[compare & decided]),
        "certain": _largest(np.maximum(certain + check, element)[compare & decided]),
        "largest": min(_largest(own["peak"]), MOST),
        "bad_b": _largest(sizes["bad_b"]),
        "seen": own["good"][compare & decided].sum(),
        "lost": lost.sum(),
        "wrapped": 0.0,
    }
    # Of the open ones first those where C alone has few values that are not finite: one may be the
    # only wrong one. Then, in an order that has nothing to do with the data, what C0 explains.
    lone, shuffled = own["bad"] - added["bad"], _shuffled(len(residual))
    few = np.where(lone > 0, 1 / np.maximum(lone, 1), 0.0) + shuffled / 1e6
    cases = [wrong, suspect & ~decided, suspect | apart, lost]
    kind = np.select(cases, [Kind.WRONG, Kind.OPEN, Kind.SUSPECT, Kind.LOST], Kind.NOT)
    return _pack(found, kind, np.select(cases, [np.zeros_like(score), few, score, shuffled]))


def _shuffled(count: int) -> Any:
    """Numbers from 0 to 1, by the golden ratio: whichever are largest, they are far apart."""
    return np.arange(1, count + 1) * ((math.sqrt(5) - 1) / 2) % 1


def _bounds(own: Any, added: Any, sizes: Any, rule: Rule) -> tuple[Any, ...]:
    """Per row: sharp bound, certain bound, largest bound of an element, own rounding."""
    alpha, beta, k = abs(rule.alpha), abs(rule.beta), rule.k + 8
    # What the three float64 products of the check round, worst case.
    check = alpha * (k + rule.n) * sizes["total"]
    check = check + (rule.n + 8) * (own["total"] + beta * added["total"])
    check = 1.01 * rule.factor * U64 * check
    c0_norm, c_norm = (np.sqrt(x["total"]) * np.sqrt(x["peak"]) for x in (added, own))
    sharp = SHARP * rule.allowed(math.sqrt(k), sizes["norm"], c0_norm, c_norm, rule.n) + check
    certain = rule.sigmas * rule.allowed(k, sizes["norm"], c0_norm, c_norm, rule.n) + check
    # And what they round where a row is recomputed: see `_compare_scaled`.
    again = k * U64 * rule.factor * (alpha * sizes["peak"] + beta * added["peak"])
    element = rule.allowed(k, sizes["peak"], added["peak"], own["peak"]) + again
    exact = rule.exact(sizes["total"], own["peak"]) & (own["total"] <= 1 / U64)
    return tuple(np.where(exact, 0.0, bound) for bound in (sharp, certain, element, check))


def _columns(array: Any, names: tuple[str, ...], rule: Rule) -> dict[str, Any]:
    return {name: array[..., rule.rounds + i].real.ravel() for i, name in enumerate(names)}


def _largest(values: Any) -> float:
    return float(values.max()) if values.size else 0.0


def _median(values: Any) -> float:
    return float(np.median(values)) if values.size else 0.0


def _one_more_wrong(scores: Any) -> Any:
    """Scores with the largest median that they can have if one of them changes."""
    return np.append(np.sort(scores)[1:], math.inf) if scores.size else scores


def _pack(found: dict[str, Any], kind: Any, score: Any) -> Any:
    place = np.lexsort((-score, -kind))[:OPEN_ROWS]
    top = np.zeros((3, OPEN_ROWS))
    top[:, : len(place)] = kind[place], score[place], place
    return np.concatenate([[float(found[name]) for name in FIELDS], top.ravel()])


@checking
def judge_elements(c: Any, *others: Any, rule: Rule) -> Any:
    """Of recomputed rows: TABLE."""
    rest = [to_numpy(other) for other in others]
    c = plain(to_numpy(c), "a block that is checked")
    count = c.shape[-1]
    sums = np.zeros((4, *c.shape), rule.dtype)
    if rule.alpha:
        found = rest.pop(0)
        sums[: found.shape[-1] // count] = np.split(found, found.shape[-1] // count, axis=-1)
    exact = sums[0]
    c0 = plain(rest.pop(0), "a block that is checked") if rule.beta else np.zeros_like(c)
    if rule.product:
        exact, c0, rule = _wrapped(exact, c0, rule)
        sums = np.stack([exact, exact])
    compare = {"bool": _compare_bool, "int": _compare_integers}.get(rule.kind, _compare)
    ratio, error, bound = compare(c, sums, c0, rule)
    if not ratio.size:
        return np.zeros((1, len(TABLE)))
    place = np.unravel_index(np.argmax(ratio), ratio.shape)
    seen = ~np.isnan(error)
    row = ratio[place], *place, error[place], bound[place], _largest(bound[seen]), seen.sum()
    return np.array([row], np.float64)


def _wrapped(exact: Any, c0: Any, rule: Rule) -> tuple[Any, Any, Rule]:
    """alpha A B and beta C0, each of which wraps around in its own dtype, and their sum's rule."""
    product = exact.astype(rule.product)
    if rule.beta:
        c0 = rule.beta * c0.astype(np.result_type(product, c0))
    plain = replace(rule, product="", alpha=1, beta=1 if rule.beta else 0, k=0)
    return (rule.alpha * product).astype(plain.dtype), c0, plain


def _compare_bool(c: Any, sums: Any, c0: Any, rule: Rule) -> tuple[Any, Any, Any]:
    exact = sums[0]
    ratio = np.where(c == ((exact > 0) | c0), 0.0, math.inf)
    return ratio, ratio, np.zeros_like(ratio)


def _compare_integers(c: Any, sums: Any, c0: Any, rule: Rule) -> tuple[Any, Any, Any]:
    exact = sums[0]
    expected = np.uint64(rule.alpha % 2**64) * exact
    expected = expected + np.uint64(rule.beta % 2**64) * c0.astype(np.uint64)
    residual = (c.astype(np.uint64) - expected) & np.uint64(2**rule.bits - 1)
    ratio = np.where(residual != 0, math.inf, 0.0)
    return ratio, ratio, np.zeros_like(ratio)


def _compare(c: Any, sums: Any, c0: Any, rule: Rule) -> tuple[Any, Any, Any]:
    """Ratio, error and bound by element; an error of NaN where nothing finite can be expected."""
    c, c0 = c.astype(rule.dtype), c0.astype(rule.dtype)
    ratio, error, bound = _compare_scaled(c, sums[0], sums[1].real, c0, rule, 1.0)
    large = np.isnan(error) | ~np.isfinite(bound)
    if len(sums) == 4 and large.any():
        # Operands are not finite, or their sums are too large for float64.
        again = _compare_scaled(c, sums[2], sums[3].real, c0, rule, SHRINK)
        # Which infinity operands make may be told by one of the two alone: small numbers underflow.
        either = np.where(np.isnan(again[1]), np.minimum(ratio, again[0]), again[0])
        ratio = np.where(large, either, ratio)
        error, bound = (
            np.where(large, own / SHRINK / SHRINK, x)
            for own, x in zip(again[1:], (error, bound), strict=True)
        )
    return ratio, error, bound


def _compare_scaled(
    c: Any, exact: Any, sizes: Any, c0: Any, rule: Rule, shrink: float
) -> tuple[Any, Any, Any]:
    """As `_compare`, where A and B are multiplied by `shrink`, and C and C0 twice."""

    def small(x: Any) -> Any:
        return x * shrink * shrink

    largest, partial = small(rule.largest), small(rule.partial)
    rule = replace(rule, tiny=small(rule.tiny))
    added = small(c0) if rule.beta else np.zeros_like(c0)
    expected = rule.alpha * exact + rule.beta * added
    unknown = ~np.isfinite(expected)
    given = expected  # with what is not finite, of which the bounds of the rest are to know nothing
    exact, added, expected = (np.where(np.isfinite(x), x, 0) for x in (exact, added, expected))
    bound = rule.allowed(rule.k + 8, np.abs(sizes), np.abs(added), np.abs(expected))
    own = abs(rule.alpha) * np.abs(sizes) + abs(rule.beta) * np.abs(added)
    bound = bound + (rule.k + 8) * U64 * rule.factor * own
    if shrink == 1:
        bound = np.where(rule.exact(np.abs(sizes), np.abs(c)), 0.0, bound)
    # What is infinite in C is right where the exact result, rounded, is that infinity, too; and
    # whatever is not finite is where a sum may have been infinite on the way. What operands make
    # infinite or NaN is that very infinity, or NaN.
    beyond = np.isinf(c) & (np.abs(expected) + bound >= largest)
    beyond &= np.real(c) * np.real(expected) >= 0 if rule.kind == "float" else True
    product = np.abs(exact) + bound
    on_the_way = (np.abs(sizes) * rule.factor + bound >= partial) | (product >= small(rule.summed))
    if rule.alpha != 1 or rule.beta:
        on_the_way |= product >= small(rule.product_largest)
        on_the_way |= np.abs(rule.alpha * exact) + bound >= largest
        on_the_way |= np.abs(rule.beta * added) + bound >= largest
    told = ~unknown | (c == given) | (np.isnan(c) & np.isnan(given))
    told |= rule.kind == "complex"  # NumPy's products of them and ours differ there
    error = np.where(np.isfinite(c) & ~unknown, np.abs(small(c) - expected), math.inf)
    ratio = np.where(np.isfinite(error), error / np.maximum(bound, LEAST), math.inf)
    right = ~np.isfinite(c) & np.where(unknown, told | on_the_way, beyond | on_the_way)
    error = np.where(unknown, math.nan, error)
    return np.where(right, 0.0, ratio), error, bound
