"""What the arguments of einsum and tensordot say, by labels: refused here as NumPy refuses it.

Knows shapes alone, no arrays. An axis has a label; axes that an ellipsis stands for are labelled
from the right, so that they broadcast as NumPy's do.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from multimm.errors import OptionError, ShapeError, integer
from multimm.shapes import Shape

Label = str  #: a letter, or "...0" for the last axis of an ellipsis
Labels = tuple[Label, ...]

_LETTERS = string.ascii_uppercase + string.ascii_lowercase  # the numbers of NumPy's other format
_DOTS = "..."


class Subscripts(NamedTuple):
    """Labels of each operand's axes, and of the result's."""

    terms: tuple[Labels, ...]
    out: Labels

    def __str__(self) -> str:
        return written(self.terms, self.out)


def written(terms: Sequence[Labels], out: Labels) -> str:
    """Labels as a string of letters: their own, or other ones where one of them is none.

    >>> written([("i", "k"), ("k", "j")], ("i", "j")), written([("i", "...0"), ("...0",)], ("i",))
    ('ik,kj->ij', 'ab,b->a')
    """
    letters = string.ascii_lowercase + string.ascii_uppercase
    known = dict.fromkeys(label for term in (*terms, out) for label in term)
    if len(known) > len(letters):
        raise OptionError(f"einsum with {len(known)} labels: at most {len(letters)} have a letter")
    own = all(len(label) == 1 for label in known)
    names = dict(zip(known, known if own else letters, strict=False))
    spelled = ["".join(names[label] for label in term) for term in (*terms, out)]
    return f"{','.join(spelled[:-1])}->{spelled[-1]}"


def of_einsum(subscripts: str, shapes: Sequence[Shape]) -> Subscripts:
    """What a string of subscripts says of operands of these shapes.

    >>> of_einsum("ij,jk", [(2, 3), (3, 4)])
    Subscripts(terms=(('i', 'j'), ('j', 'k')), out=('i', 'k'))

    Raises
    ------
    OptionError
        A string that NumPy refuses.
    ShapeError
        Shapes that do not fit it.
    """
    terms, arrow, out = subscripts.partition("->")
    inputs = [_spelled(term, subscripts) for term in terms.split(",")]
    result = _spelled(out, subscripts) if arrow else None
    return _checked(inputs, result, shapes, f"einsum({subscripts!r})")


def of_lists(terms: Sequence[Any], out: Any, shapes: Sequence[Shape]) -> Subscripts:
    """The same of lists of numbers and ellipses, one behind each operand and one at the end."""
    inputs = [_numbered(term) for term in terms]
    result = None if out is None else _numbered(out)
    spelled = ",".join("".join(term) for term in inputs)
    spelled += "" if result is None else "->" + "".join(result)
    return _checked(inputs, result, shapes, f"einsum of lists ({spelled!r})")


def _spelled(term: str, whole: str) -> list[Label]:
    found, rest = [], term.lstrip(" ")
    while rest:
        step = len(_DOTS) if rest.startswith(_DOTS) else 1
        label, rest = rest[:step], rest[step:].lstrip(" ")  # none within an ellipsis
        if label != _DOTS and label not in _LETTERS:
            why = (
                "a '.' that is not part of an ellipsis ('...')"
                if label == "."
                else "'->' more than once, or half of it"
                if label in "->"
                else f"{label!r}"
            )
            raise OptionError(
                f"einsum({whole!r}) holds {why}: subscripts are a to z, A to Z and '...', operands "
                "are separated by ',' and the result stands behind one '->'"
            )
        found.append(label)
    return found


def _numbered(term: Any) -> list[Label]:
    given = None if isinstance(term, str) or not isinstance(term, Iterable) else [*term]
    found = []
    for x in [None] if given is None else given:
        number = integer(x)
        if x is not Ellipsis and number is None:
            raise OptionError(
                f"einsum with {term!r} for the axes of an operand: give a list of integers and "
                "Ellipsis behind each operand, or a string of subscripts before all"
            )
        if number is not None and not 0 <= number < len(_LETTERS):
            last = len(_LETTERS) - 1
            raise OptionError(f"einsum with axis number {number}: numbers are 0 to {last}")
        found.append(_DOTS if number is None else _LETTERS[number])
    return found


def _checked(
    inputs: list[list[Label]], out: list[Label] | None, shapes: Sequence[Shape], call: str
) -> Subscripts:
    if len(inputs) != len(shapes):
        raise OptionError(
            f"{call} names {len(inputs)} operands, got {len(shapes)}: give one for each"
        )
    terms = tuple(
        _axes(term, shape, n, call)
        for n, (term, shape) in enumerate(zip(inputs, shapes, strict=True))
    )
    if out is None:
        every = [label for term in inputs for label in term if label != _DOTS]
        out = [_DOTS, *sorted(label for label in {*every} if every.count(label) == 1)]
        named = any(_DOTS in term for term in inputs)
        out = out if named else out[1:]
    if out.count(_DOTS) > 1:
        raise OptionError(f"{call} has more than one '...' in the result: one stands for all")
    dotted = [label for term in terms for label in term if label.startswith(_DOTS)]
    broadcast = sorted({*dotted}, key=lambda label: -int(label.removeprefix(_DOTS)))
    if broadcast and _DOTS not in out:
        raise OptionError(
            f"{call}: '...' stands for {len(broadcast)} axes of the operands and is missing in the "
            "result; write it there, too, or name the axes that are summed over"
        )
    result: list[Label] = []
    for label in out:
        result += broadcast if label == _DOTS else [label]
    for label in result:
        if result.count(label) > 1:
            raise OptionError(f"{call}: {label!r} is more than once in the result: name it once")
        if not any(label in term for term in terms):
            raise OptionError(f"{call}: {label!r} of the result is in no operand: name it in one")
    found = Subscripts(terms, tuple(result))
    _check_sizes(found, shapes, call)
    return found


def _axes(term: list[Label], shape: Shape, number: int, call: str) -> Labels:
    """A label for each axis of an operand."""
    if term.count(_DOTS) > 1:
        raise OptionError(f"{call} has more than one '...' for operand {number}: one is enough")
    named = len(term) - term.count(_DOTS)
    more = len(shape) - named
    if more < 0 or (more and _DOTS not in term):
        todo = "name as many axes" if more < 0 else "name them all, or add '...'"
        raise ShapeError(
            f"{call} names {named} axes of operand {number}, which has shape {shape}: {todo}"
        )
    found: list[Label] = []
    for label in term:
        found += [f"{_DOTS}{n}" for n in range(more)][::-1] if label == _DOTS else [label]
    return tuple(found)


def _check_sizes(found: Subscripts, shapes: Sequence[Shape], call: str) -> None:
    sizes: dict[Label, int] = {}
    for number, (term, shape) in enumerate(zip(found.terms, shapes, strict=True)):
        own: dict[Label, int] = {}
        for label, size in zip(term, shape, strict=True):
            if own.setdefault(label, size) != size:
                raise ShapeError(
                    f"{call} takes the diagonal over {label!r} of operand {number}, of shape "
                    f"{shape}: sizes {own[label]} and {size} must be the same"
                )
        for label, size in own.items():
            if sizes.get(label, 1) == 1:
                sizes[label] = size
            elif size not in (1, sizes[label]):
                raise ShapeError(
                    f"{call} of shapes {', '.join(map(str, shapes))}: {label!r} has sizes "
                    f"{sizes[label]} and {size}, which must be the same or 1"
                )


def of_tensordot(axes: Any, shape_a: Shape, shape_b: Shape) -> Subscripts:
    """What `axes` of tensordot says: the last so many axes of A and the first of B, or which ones.

    Raises
    ------
    OptionError
        Axes that are not there, twice the same, or no numbers.
    ShapeError
        Axes of different lengths.
    """
    left, right = _two_lists(axes, len(shape_a))
    call = f"tensordot of shapes {shape_a} and {shape_b} with axes={axes!r}"
    own = [_normal(x, shape, call) for x, shape in ((left, shape_a), (right, shape_b))]
    if len(own[0]) != len(own[1]):
        raise ShapeError(f"{call}: as many axes of a as of b are summed over; name them in pairs")
    for i, j in zip(*own, strict=True):
        if shape_a[i] != shape_b[j]:
            raise ShapeError(
                f"{call}: axis {i} of a has size {shape_a[i]} and axis {j} of b {shape_b[j]}; "
                "each pair must be of one size"
            )
    # Numbers of axes are labels: a's first, then b's.
    a = [f"a{n}" for n in range(len(shape_a))]
    b = [f"b{n}" for n in range(len(shape_b))]
    for i, j in zip(*own, strict=True):
        b[j] = a[i]
    summed = {a[i] for i in own[0]}
    return Subscripts((tuple(a), tuple(b)), tuple(x for x in (*a, *b) if x not in summed))


def _two_lists(axes: Any, ndim: int) -> tuple[list[Any], list[Any]]:
    if (count := integer(axes)) is not None:
        return [*range(ndim - max(count, 0), ndim)], [*range(max(count, 0))]
    try:
        left, right = axes
    except (TypeError, ValueError):
        raise OptionError(
            f"tensordot with axes={axes!r}: give a number of axes, or two lists of axes"
        ) from None
    both = [[x] if isinstance(x, Integral) else x for x in (left, right)]
    if not all(isinstance(x, Iterable) and not isinstance(x, str) for x in both):
        raise OptionError(
            f"tensordot with axes={axes!r}: give a number of axes, or two lists of axes"
        )
    return [*both[0]], [*both[1]]


def _normal(axes: list[Any], shape: Shape, call: str) -> list[int]:
    found = []
    for axis in axes:
        number = integer(axis)
        if number is None or not -len(shape) <= number < len(shape):
            raise OptionError(
                f"{call}: {axis!r} is no axis of an array with {len(shape)}; number them from 0, "
                "or from -1 backwards"
            )
        found.append(number % len(shape))
    if len({*found}) < len(found):
        raise OptionError(f"{call}: an axis is summed over twice; name it once")
    return found
