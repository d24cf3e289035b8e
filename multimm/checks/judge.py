"""Verdicts on blocks of rows of C, from the sketches of both sides or element by element."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from multimm.blocks import plain
from multimm.checks.rule import SHARP, U64, Rule
from multimm.checks.tasks import SIZES, STATS
from multimm.failures import named
from multimm.gpu.arrays import to_numpy

#: What one block of rows tells: how many rows are wrong and the worst ratio of those; how many
#: are suspect, how many of these the sketch cannot settle (open), and how many others stand
#: apart; worst ratios of the rows that pass the sharp bound and of the suspects that keep the
#: certain one; the errors of one element that standing apart and the two bounds would show;
#: largest element of C; non-finite elements of B.
FIELDS = (
    *("wrong", "worst", "suspects", "open", "apart", "passed", "kept"),
    *("outlier", "sharp", "certain", "largest", "bad_b"),
)
#: A row stands apart if it differs by this many times the median of its block, both in units
#: of the sharp bound. Arbitrary: the largest of many right rows stays below 4 on normal data,
#: and a row that is right costs no more than a second look.
OUTLIER = 16
#: Rows that are recomputed (arbitrary: one bug shows in one row as well as in many).
ROWS = 16
#: Length of a verdict: FIELDS, the scores of the worst rows, their places in the block.
WIDTH = len(FIELDS) + 2 * ROWS


@named
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
    residual = c.copy()
    for scalar, part in ((rule.alpha, product), (rule.beta, c0)):
        if part is not None:
            residual -= np.uint64(scalar % 2**64) * part
    wrong = (residual & np.uint64(2**rule.bits - 1)).any(axis=-1).ravel()
    found = dict.fromkeys(FIELDS, 0.0) | {"wrong": wrong.sum(), "outlier": 1.0, "sharp": 1.0}
    found["certain"] = 1.0
    found["worst"] = math.inf if wrong.any() else 0.0
    return _pack(found, np.where(wrong, math.inf, 0.0))


def _judge_rows(c: Any, product: Any, c0: Any, rule: Rule) -> Any:
    empty = np.zeros((*c.shape[:-1], rule.rounds + len(STATS)), c.dtype)
    product, c0 = empty if product is None else product, empty if c0 is None else c0
    with np.errstate(invalid="ignore", over="ignore"):
        residual, sharp, certain, element, check = _bounds(c, product, c0, rule)
    own, added = _columns(c, STATS, rule), _columns(c0, STATS, rule)
    sizes = _columns(product, SIZES, rule)
    infected = sizes["bad_a"] > 0  # then all of C's row is non-finite
    broken = own["hidden"] + np.where(infected, own["good"], 0) > 0
    compare = ~infected & ~broken
    decided = np.isfinite(residual) & np.isfinite(certain) & (own["bad"] + added["bad"] == 0)
    suspect = compare & ~(decided & (residual <= sharp))
    wrong = broken | (compare & decided & ~(residual <= certain))
    # Values that C alone calls non-finite are looked at first, then those that C0 explains.
    unsettled = np.where(own["bad"] > added["bad"], math.inf, 1e300)
    score = np.where(decided, residual / np.maximum(sharp, 1e-300), unsettled)
    ratio = np.where(decided, residual / np.maximum(certain, 1e-300), 0.0)
    usual = OUTLIER * _median(score[compare & decided])
    apart = compare & decided & ~suspect & (score > usual)
    found = {
        "wrong": wrong.sum(),
        "worst": math.inf if broken.any() else _largest(ratio[wrong]),
        "suspects": suspect.sum(),
        "open": (suspect & ~decided).sum(),
        "apart": apart.sum(),
        "passed": _largest(score[compare & ~suspect]),
        "kept": _largest(ratio[suspect & decided]),
        # One element off by d moves the difference by d, less what the check rounds.
        "outlier": _largest(np.maximum(usual * sharp + check, element)[compare]),
        "sharp": _largest(np.maximum(sharp + check, element)[compare]),
        "certain": _largest(np.maximum(certain + check, element)[compare]),
        "largest": _largest(own["peak"]),
        "bad_b": _largest(sizes["bad_b"]),
    }
    return _pack(found, np.where(wrong, math.inf, np.where(suspect | apart, score, 0.0)))


def _bounds(c: Any, product: Any, c0: Any, rule: Rule) -> tuple[Any, Any, Any, Any, Any]:
    """Per row: largest |C X - expected|, sharp bound, certain bound, largest e, own rounding."""
    rounds = slice(rule.rounds)
    expected = rule.alpha * product[..., rounds] + rule.beta * c0[..., rounds]
    residual = np.abs(c[..., rounds] - expected).max(axis=-1).ravel()
    own, added = _columns(c, STATS, rule), _columns(c0, STATS, rule)
    sizes = _columns(product, SIZES, rule)
    alpha, beta, k = abs(rule.alpha), abs(rule.beta), rule.k + 8
    # What the three float64 products of the check round, worst case.
    check = alpha * (k + rule.n) * sizes["total"]
    check = check + (rule.n + 8) * (own["total"] + beta * added["total"])
    check = 1.01 * rule.factor * U64 * check
    c0_norm, c_norm = (np.sqrt(x["total"]) * np.sqrt(x["peak"]) for x in (added, own))
    sharp = SHARP * rule.allowed(math.sqrt(k), sizes["norm"], c0_norm, c_norm, rule.n) + check
    certain = rule.sigmas * rule.allowed(k, sizes["norm"], c0_norm, c_norm, rule.n) + check
    element = rule.allowed(k, sizes["peak"], added["peak"], own["peak"]) + check
    return residual, sharp, certain, element, check


def _columns(array: Any, names: tuple[str, ...], rule: Rule) -> dict[str, Any]:
    return {name: array[..., rule.rounds + i].real.ravel() for i, name in enumerate(names)}


def _largest(values: Any) -> float:
    return float(values.max()) if values.size else 0.0


def _median(values: Any) -> float:
    return float(np.median(values)) if values.size else 0.0


def _pack(found: dict[str, Any], score: Any) -> Any:
    place = np.argsort(-score, kind="stable")[:ROWS]
    top = np.zeros((2, ROWS))
    top[0, : len(place)], top[1, : len(place)] = score[place], place
    return np.concatenate([[float(found[name]) for name in FIELDS], top.ravel()])


@named
def judge_elements(c: Any, *others: Any, rule: Rule) -> Any:
    """[worst ratio, its row and column in the block, difference, bound] of recomputed rows."""
    rest = [to_numpy(other) for other in others]
    c = plain(to_numpy(c), "a block that is checked")
    count = c.shape[-1]
    exact, sizes = np.zeros((2, *c.shape), rule.dtype)
    if rule.alpha:
        both = rest.pop(0)
        exact, sizes = both[..., :count], both[..., count:].real
    c0 = plain(rest.pop(0), "a block that is checked") if rule.beta else np.zeros_like(c)
    if rule.product:
        exact, c0, rule = _wrapped(exact, c0, rule)
        sizes = exact
    compare = {"bool": _compare_bool, "int": _compare_integers}.get(rule.kind, _compare)
    ratio, error, bound = compare(c, exact, sizes, c0, rule)
    if not ratio.size:
        return np.zeros((1, 5))
    place = np.unravel_index(np.argmax(ratio), ratio.shape)
    return np.array([[ratio[place], *place, error[place], bound[place]]], np.float64)


def _wrapped(exact: Any, c0: Any, rule: Rule) -> tuple[Any, Any, Rule]:
    """alpha A B and beta C0, each of which wraps around in its own dtype, and their sum's rule."""
    product = exact.astype(rule.product)
    if rule.beta:
        c0 = rule.beta * c0.astype(np.result_type(product, c0))
    plain = replace(rule, product="", alpha=1, beta=1 if rule.beta else 0, k=0)
    return (rule.alpha * product).astype(plain.dtype), c0, plain


def _compare_bool(c: Any, exact: Any, sizes: Any, c0: Any, rule: Rule) -> tuple[Any, Any, Any]:
    ratio = np.where(c == ((exact > 0) | c0), 0.0, math.inf)
    return ratio, ratio, np.zeros_like(ratio)


def _compare_integers(c: Any, exact: Any, sizes: Any, c0: Any, rule: Rule) -> tuple[Any, Any, Any]:
    expected = np.uint64(rule.alpha % 2**64) * exact
    expected = expected + np.uint64(rule.beta % 2**64) * c0.astype(np.uint64)
    residual = (c.astype(np.uint64) - expected) & np.uint64(2**rule.bits - 1)
    ratio = np.where(residual != 0, math.inf, 0.0)
    return ratio, ratio, np.zeros_like(ratio)


def _compare(c: Any, exact: Any, sizes: Any, c0: Any, rule: Rule) -> tuple[Any, Any, Any]:
    c, c0 = c.astype(rule.dtype), c0.astype(rule.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = rule.alpha * exact + (rule.beta * c0 if rule.beta else 0)
        bound = rule.allowed(rule.k + 8, np.abs(sizes), np.abs(c0), np.abs(expected))
        own = abs(rule.alpha) * np.abs(sizes) + abs(rule.beta) * np.abs(c0)
        bound = bound + (rule.k + 8) * U64 * rule.factor * own
        error = np.abs(c - expected)
        ratio = np.where(np.isfinite(error), error / np.maximum(bound, 1e-300), math.inf)
        beyond = np.abs(expected) + bound >= rule.largest
        beyond |= np.abs(rule.alpha * exact) + bound >= rule.summed
        beyond &= np.isinf(c)
        beyond &= np.real(c) * np.real(expected) >= 0 if rule.kind == "float" else True
    right = ~np.isfinite(c) & (~np.isfinite(expected) | beyond)
    return np.where(right, 0.0, ratio), error, bound
