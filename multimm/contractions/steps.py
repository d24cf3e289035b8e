"""A sum over several operands as steps of one or two: in which order, and which are products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from dask.array.core import common_blockdim

from multimm.contractions.einsum_chunks import Rule, limited_chunks
from multimm.contractions.pair import Matrices, Term, as_stored, elementwise, matrices, roles
from multimm.contractions.paths import path
from multimm.contractions.subscripts import Label, Labels, Subscripts
from multimm.gpu.dtypes import common_dtype
from multimm.gpu.integers.bounds import is_narrow
from multimm.gpu.kernel_selection import Precision, check_held
from multimm.operands import Array, is_dask, on_gpu
from multimm.planning.tiling.grid import Blocks
from multimm.products import ask


class Step(NamedTuple):
    """Operands, by their places in a list, that are taken out of it; what is made comes last.

    Of a step of one operand it comes in its place.
    """

    places: tuple[int, ...]
    out: Labels
    product: bool  #: of matrices; else `elementwise`


class Contraction(NamedTuple):
    """Operands, what becomes of their axes, and the steps there."""

    terms: tuple[Term, ...]  #: as they were given
    out: Labels
    steps: tuple[Step, ...]
    rule: Rule  #: what the chunks of the result are
    asked: np.dtype[Any] | None = None  #: the dtype of the result, if it was asked for
    gpu: bool = False  #: whether operands lie on GPUs

    @property
    def products(self) -> int:
        """How many steps are products of matrices."""
        return sum(step.product for step in self.steps)

    @property
    def why_none(self) -> str:
        """Why no step is a product of matrices."""
        if len(self.terms) == 1:
            return "one operand"
        labels = [term.labels for term in without_broadcasts(self.terms)]
        shared = {x for own in labels for x in own if sum(x in other for other in labels) > 1}
        if shared <= {*self.out}:
            return "no axis of two operands is summed over"
        return "the result has no axis of one operand alone"

    def result(self, precision: Precision) -> Array:
        """Lazy if an operand is, else computed."""
        check_held(precision, str(self.dtype))
        lazy = [as_stored(term).array for term in self.terms if is_dask(term.array)]
        # Of all operands at once, however many steps there are.
        answer = ask(None, lazy) if lazy and self.products > 1 else None
        lone = answer is not None and answer.cluster is not None and answer.cluster.threads == 1

        def multiplied(
            found: Matrices, terms: list[Term], out: Labels, dtype: np.dtype[Any] | None
        ) -> Array:
            made = found.product(precision, dtype).result(answer)
            return found.apart(made, out, lone=lone)

        return self.run(multiplied, elementwise)

    def run(
        self,
        multiplied: Callable[[Matrices, list[Term], Labels, np.dtype[Any] | None], Array],
        by_elements: Callable[[list[Term], Labels, np.dtype[Any] | None], Array],
    ) -> Array:
        """Step by step, with functions for those that are products of matrices and for others.

        Both are given operands, labels of what they make, and its dtype.
        """
        terms = without_broadcasts(self.terms)
        for step in self.steps:
            taken = [terms[place] for place in step.places]
            dtype = self._dtype(taken, step)
            if step.product:
                chunks = self.chunks(taken, step)
                a, b = taken
                made = multiplied(matrices(a, b, step.out, chunks), taken, step.out, dtype)
            else:
                made = by_elements(taken, step.out, dtype)
            made_here = Term(made, step.out, alone=step.product and is_dask(made))
            kept = [term for n, term in enumerate(terms) if n not in step.places]
            kept.insert(step.places[0] if len(taken) == 1 else len(kept), made_here)
            terms = kept
        made = terms[0].array
        if is_dask(made) and len(self.steps) > 1:
            chunks = self.chunks(terms, self.steps[-1])
            made = made.rechunk(tuple(chunks[label] for label in self.out))
        return made if made.dtype == self.dtype else made.astype(self.dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the result."""
        return self.asked or common_dtype(*(term.array.dtype for term in self.terms))

    def _dtype(self, taken: Sequence[Term], step: Step) -> np.dtype[Any] | None:
        """Of what a step makes: the result's. None: it is what NumPy's rule gives for its operands.

        Sums on the way might leave the dtype of their own operands, which stay what they are. As
        long as these are real, so are their sums. Those of narrow integers are rounded once, at the
        end.
        """
        own = [term.array.dtype for term in taken]
        if len(self.steps) > 1 and self.dtype.kind in "fc":
            if all(is_narrow(term.array.dtype) for term in self.terms):
                return np.dtype("float64")
            if self.dtype == np.float16:
                return np.dtype("float32")  # what sums on the way are may be beyond 65504
        if not self.asked and common_dtype(*own) == self.dtype:
            return None
        real = step is not self.steps[-1] and not any(x.kind == "c" for x in own)
        return np.empty(0, self.dtype).real.dtype if real else self.dtype

    def chunks(self, taken: Sequence[Term], step: Step) -> dict[Label, Blocks]:
        """Chunks of what a step makes, by label: in the end those of all operands."""
        terms = self.terms if step is self.steps[-1] else taken
        if not all(is_dask(term.array) for term in terms):
            return {}
        labels, chunks = zip(*((term.labels, term.array.chunks) for term in terms), strict=True)
        return self.rule(labels, chunks, step.out, self.dtype, self.gpu)


def _on_diagonals(array: Array, labels: Labels) -> Term:
    """An operand; the axes of a diagonal come in the same chunks."""
    if is_dask(array) and len({*labels}) < len(labels):
        own: dict[Label, list[Blocks]] = {}
        for label, blocks in zip(labels, array.chunks, strict=True):
            own.setdefault(label, []).append(blocks)
        array = array.rechunk(tuple(common_blockdim(own[label]) for label in labels))
    return Term(array, labels)


def contraction(
    subscripts: Subscripts,
    arrays: Sequence[Array],
    optimize: Any = True,
    *,
    rule: Rule = limited_chunks,
    dtype: np.dtype[Any] | None = None,
) -> Contraction:
    """The steps to a result.

    Parameters
    ----------
    subscripts : Subscripts
    arrays : sequence of array
        NumPy, CuPy or Dask arrays, all of one kind.
    optimize : bool, str, or sequence
        The order, as for `multimm.einsum`.
    rule : callable
        What the chunks of the result are: a `Rule`.
    dtype : dtype, optional
        Of the result, to which all operands can be cast. Default: NumPy's for them.
    """
    given = tuple(_on_diagonals(x, own) for x, own in zip(arrays, subscripts.terms, strict=True))
    out = subscripts.out
    found = without_broadcasts(given)
    sizes = {x: n for term in found for x, n in zip(term.labels, term.array.shape, strict=True)}
    current = [term.labels for term in found]
    steps = []
    for place, own in enumerate(current):
        others = {*out}.union(*(x for n, x in enumerate(current) if n != place))
        kept = tuple(dict.fromkeys(x for x in own if x in others)) if len(current) > 1 else out
        if kept != own:
            steps.append(Step((place,), kept, product=False))
            current[place] = kept
    blocks = {x: max(len(t.blocks(x)) for t in found if x in t.labels) for x in sizes}
    for places in path(current, out, sizes, blocks, optimize):
        steps += _pairs(current, places, out)
    return Contraction(given, out, tuple(steps), rule, dtype, any(map(on_gpu, arrays)))


def _pairs(current: list[Labels], places: tuple[int, ...], out: Labels) -> list[Step]:
    """The steps that take some operands out of a list, two at a time, and put the result there."""
    found = []
    left = sorted(places)
    while len(left) > 1:
        first, second = left[:2]
        both = current[first], current[second]
        rest = [x for n, x in enumerate(current) if n not in (first, second)]
        needed = {*out}.union(*rest)
        made = tuple(dict.fromkeys(x for own in both for x in own if x in needed)) if rest else out
        found.append(Step((first, second), made, roles(*both, made).product))
        current[:] = [*rest, made]
        # The others have moved by those before them, and what was made is the last.
        left = [*(n - (first < n) - (second < n) for n in left[2:]), len(current) - 1]
        left = left if len(left) > 1 else []
    return found


def without_broadcasts(terms: Sequence[Term]) -> list[Term]:
    """Axes of length 1 are left out where another operand has a longer one of that label."""
    longest: dict[Label, int] = {}
    for term in terms:
        for label, size in zip(term.labels, term.array.shape, strict=True):
            longest[label] = size if longest.get(label, 1) == 1 else longest[label]
    found = []
    for term in terms:
        shape = term.array.shape
        gone = [n for n, x in enumerate(term.labels) if shape[n] == 1 and longest[x] != 1]
        kept = tuple(x for n, x in enumerate(term.labels) if n not in gone)
        array = term.array
        if gone:
            array = array[tuple(0 if n in gone else slice(None) for n in range(len(shape)))]
        found.append(Term(array, kept))
    return found
