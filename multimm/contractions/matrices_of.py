"""Operands and result of a sum over any axes as those of a product of matrices, to check it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multimm.contractions.functions import einsum_steps, of_one_kind, tensordot_steps
from multimm.contractions.pair import Term, matrices
from multimm.contractions.steps import without_broadcasts
from multimm.contractions.subscripts import written
from multimm.errors import OptionError, ShapeError
from multimm.operands import Array


def matrices_of(
    subscripts: str | None, operands: Sequence[Any], result: Any, axes: Any = None
) -> tuple[Array, Array, Array]:
    """A, B and C, matrices or stacks of them, of which C is A B if `result` is right.

    Parameters
    ----------
    subscripts : str or None
        Of `einsum`; None: of `tensordot`, with `axes`.
    operands : sequence of array
    result : array
        What einsum or tensordot made of them.
    axes : int or two sequences of int
        Of `tensordot`.

    Raises
    ------
    OptionError
        A sum that is no product of two operands, or more than that.
    ShapeError
        A result of another shape than these operands make.
    """
    *given, made = of_one_kind([*operands, result])
    if subscripts is None:
        a, b = given
        found = tensordot_steps(a, b, axes)
    else:
        found = einsum_steps([subscripts, *given])
    terms = without_broadcasts(found.terms)
    call = written([term.labels for term in found.terms], found.out)
    if [step.product for step in found.steps] != [True]:
        many = found.products + len(found.steps) > 1
        why = f"is {len(found.steps)} steps" if many else f"is no product: {found.why_none}"
        raise OptionError(
            f"verify of einsum({call!r}), which {why}: give two operands and their sum of "
            "products, one step after the other"
        )
    sizes = {x: n for term in terms for x, n in zip(term.labels, term.array.shape, strict=True)}
    if made.shape != (shape := tuple(sizes[x] for x in found.out)):
        raise ShapeError(f"c has shape {made.shape}: einsum({call!r}) of these makes {shape}")
    a, b = terms
    pair = matrices(a, b, found.out, found.chunks(terms, found.steps[0]))
    return pair.left.stack, pair.right.stack, pair.together(Term(made, found.out))
