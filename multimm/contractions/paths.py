"""In which order several operands are multiplied: as opt_einsum finds it, sums in blocks first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

from multimm.contractions.subscripts import Label, Labels, written
from multimm.errors import OptionError, one_line

#: Operands up to which all orders are looked at: of four there are 18, of five 180. Arbitrary.
MOST_OPERANDS = 4

Path = list[tuple[int, ...]]


def path(
    labels: Sequence[Labels],
    out: Labels,
    sizes: Mapping[Label, int],
    blocks: Mapping[Label, int],
    optimize: Any,
) -> Path:
    """Which operands are taken together, and so on; what they make comes last.

    Of orders with as few operations as opt_einsum's, that which makes the smallest sums over axes
    in several blocks: these may lie on several workers, which send each other what they have
    summed. Sums over other axes stay where they are made. Only if no order is asked for.

    Parameters
    ----------
    labels : sequence of Labels
        Of each operand's axes.
    out : Labels
    sizes, blocks : mapping
        Length of each axis, and how many blocks it comes in.
    optimize : bool, str, or sequence
        As for `multimm.einsum`.

    Raises
    ------
    OptionError
        If `optimize` is no order of so many operands.
    """
    if len(labels) < 3:
        return [(0, 1)] if len(labels) == 2 else []
    found = _of_opt_einsum(labels, out, sizes, optimize)
    asked = not (optimize is None or isinstance(optimize, bool))
    pairs = all(len(places) == 2 for places in found)
    if asked or not pairs or len(labels) > MOST_OPERANDS or max(blocks.values(), default=1) == 1:
        return found
    most, least = _cost(found, labels, out, sizes, blocks)
    for other in _orders(len(labels)):
        operations, sent = _cost(other, labels, out, sizes, blocks)
        if operations <= most and sent < least:
            found, least = other, sent
    return found


def _orders(count: int) -> Iterator[Path]:
    """All orders of so many operands, two at a time."""
    if count < 2:
        yield []
        return
    for places in combinations(range(count), 2):
        for rest in _orders(count - 1):
            yield [places, *rest]


def _cost(
    order: Path,
    labels: Sequence[Labels],
    out: Labels,
    sizes: Mapping[Label, int],
    blocks: Mapping[Label, int],
) -> tuple[int, int]:
    """Multiplications, and elements of sums over axes in several blocks."""
    left, operations, sent = [{*own} for own in labels], 0, 0
    for places in order:
        both = set().union(*(left[place] for place in places))
        left = [own for place, own in enumerate(left) if place not in places]
        made = both & {*out}.union(*left)
        operations += prod(sizes[x] for x in both)
        sent += any(blocks[x] > 1 for x in both - made) * prod(sizes[x] for x in made)
        left.append(made)
    return operations, sent


def _of_opt_einsum(
    labels: Sequence[Labels], out: Labels, sizes: Mapping[Label, int], optimize: Any
) -> Path:
    import opt_einsum  # type: ignore[import-untyped]  # it takes 16 ms, few need it

    shapes = [tuple(sizes[label] for label in own) for own in labels]
    equation = written([*labels], out)
    try:
        asked, limit = _asked(optimize)
        found, _ = opt_einsum.contract_path(
            equation, *shapes, shapes=True, optimize=asked, memory_limit=limit
        )
        left = len(labels)
        for places in found:
            if not places or not all(0 <= place < left for place in places):
                raise ValueError(f"no operands {places} of {left}")
            left -= len({*places}) - 1
        if left != 1:
            raise ValueError(f"{left} operands are left")
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise OptionError(
            f"einsum with optimize={optimize!r} is no path for {len(labels)} operands "
            f"({one_line(error)}): give True, a name such as 'greedy' or 'optimal', or what "
            "numpy.einsum_path returns"
        ) from None
    return [tuple(places) for places in found]


def _asked(optimize: Any) -> tuple[Any, Any]:
    """What NumPy takes for a path, as opt_einsum takes it: method or path, and limit of memory."""
    if optimize is None or isinstance(optimize, bool):
        return "auto", None
    if isinstance(optimize, str):
        return optimize, None
    given = [*optimize] if isinstance(optimize, list | tuple) else [optimize]
    if given[:1] == ["einsum_path"]:
        return [tuple(x) for x in given[1:]], None
    if len(given) == 2 and isinstance(given[0], str):
        return given[0], int(given[1])
    return optimize, None
