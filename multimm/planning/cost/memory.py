"""What the fullest worker of a layout holds, in bytes: a sum of named terms."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from multimm.planning.cost.reading import held as held_by_reading
from multimm.planning.hardware import ClusterSpec
from multimm.planning.schedule import SHORT, WINDOW, Schedule
from multimm.planning.tiling.counts import bounds_blocks
from multimm.planning.tiling.grid import ceil_div

Terms = dict[str, float]
#: Bytes that must stay, and that may be spilled.
Held = tuple[Terms, Terms]

#: Blocks that a worker brings from host memory, or into it, at a time: while one task begins or
#: ends, the other one's bytes travel. Who waits has no memory on the GPU yet.
AT_ONCE = 2
#: Products of host blocks that a worker has on its GPU: one runs, and the next one is launched.
IN_FLIGHT = 2
#: Bytes of the sums of slices of k that a product on the tensor cores adds up itself, at most, or
#: as many as one for so many elements of its operands takes; and how many slices there are.
SLICED, SLICED_SHARE, SLICES = 2**26, 16, 63
#: Of an exact product of integers: bytes of an element, and of a sum, of the format that it is
#: computed in; and how much of k is converted at a time (`multimm.gpu.integers.float_blas.MOST`).
#: Digits are more numbers of a shorter k.
EXACT_BYTES, EXACT_K = {"tf32": 4, "float32": 4, "float64": 8, "digits": 8}, 4096
#: How much of k is packed as residues at a time (`multimm.gpu.residues.gemm.STRETCH`).
RESIDUE_K = 2**15


# Cuts that differ on paper are often the same blocks.
@lru_cache(maxsize=128)
def held(layout: Schedule, cluster: ClusterSpec) -> Held:
    """Bytes of the fullest worker: what must stay, and what may be spilled, by name."""
    p, each = layout.problem, crowd(layout, cluster)
    result = each * layout.work.most_kept
    at_once = each
    if _made_when_due(layout, cluster):
        at_once = products_at_once(layout, cluster)
    elif layout.in_turn(cluster.workers):
        at_once = min(each, products_at_once(layout, cluster))
    k_tiles = _k_tiles(layout, cluster, at_once)
    stay = (
        _sums(layout, cluster) | k_tiles | _received(layout, cluster) | _changing(layout, cluster)
    )
    stay |= _joined(layout) | _handed_out(layout)
    if reading := held_by_reading(layout, cluster):
        stay["reading storage chunks"] = reading
    finished: Terms = {"C finished": (result - each * _in_row_panel(layout)) * p.out_bytes}
    if p.downloaded:  # all but those of a row panel are in host memory by then
        finished, stay = {}, stay | _coming_back(layout, cluster)
    spill = finished | _kept(layout, cluster, each, k_tiles) | _cut_before(layout, cluster)
    if p.c is not None:
        spill |= _addend(layout, cluster, result * p.c.itemsize)
    return stay, {name: size for name, size in spill.items() if size > 0}


def _coming_back(layout: Schedule, cluster: ClusterSpec) -> Terms:
    """Of blocks of C that are on their way to host memory: those of the row panel before."""
    if layout.row_panels == 1:
        return {}
    most = max(
        crowd(layout, cluster) * layout.work.most_in_row_panel,
        (1 + _perhaps_made(layout, cluster)) * _block(layout),
    )
    return {"C coming back": most * layout.problem.out_bytes}


def download_limit(layout: Schedule, cluster: ClusterSpec) -> int | None:
    """Bytes of C that may be on their way from a worker while it multiplies; None: any number.

    `held` has room for the blocks of a row panel, of which products in flight may have made some.
    """
    if not (room := _coming_back(layout, cluster)):
        return None
    block = _block(layout) * layout.problem.out_bytes
    return int(room["C coming back"]) - _perhaps_made(layout, cluster) * block


def _perhaps_made(layout: Schedule, cluster: ClusterSpec) -> int:
    """Blocks of C that may be there beside those that come back.

    Products in flight make them, and one more may be over of which the worker does not know yet.
    """
    return products_at_once(layout, cluster) + layout.overlaps


def excess(held: Held, cluster: ClusterSpec) -> float:
    """Bytes of `held` beyond what the smallest worker may use."""
    stay, spill = held
    return max(0.0, sum(stay.values()) + sum(spill.values()) - cluster.budget_bytes)


def products_at_once(layout: Schedule, cluster: ClusterSpec) -> int:
    """Block products for which a worker has memory at a time."""
    return max(cluster.threads, IN_FLIGHT if layout.overlaps else 1)


def crowd(layout: Schedule, cluster: ClusterSpec) -> int:
    """Places of the grid that a worker has: one, but for a large p_k."""
    return ceil_div(layout.ranks, cluster.workers)


def _block(layout: Schedule) -> int:
    """Elements of the largest block of C."""
    return max(1, layout.largest.rows * layout.largest.n)


def _sums(layout: Schedule, cluster: ClusterSpec) -> Terms:
    """The sums of a row panel of one worker, and those that its threads are making."""
    p, block = layout.problem, _block(layout)
    complex_packed = p.packs and p.real_products > 1
    made = block * (p.sum_bytes + p.out_bytes)
    made += _sliced(layout) * (p.packable or complex_packed)
    if complex_packed and (layout.mirrors or p.reals("b") == 1):
        made += block * p.sum_bytes  # real and imaginary parts, before they are joined
    if p.packs and p.by_residues:
        made += block * p.packed_itemsize  # residues, before they are joined
    made += block * layout.mirrors  # a mask of the triangle
    made += block * EXACT_BYTES.get(p.exact, 0)
    return {
        "partial sums": _sums_at_once(layout, cluster) * _in_row_panel(layout) * p.sum_bytes,
        "sums being made": products_at_once(layout, cluster) * made,
    }


def _in_row_panel(layout: Schedule) -> int:
    """Elements of sums that a place has: block by block none but those that threads are making."""
    return 0 if layout.by_block else layout.work.most_in_row_panel * (1 + layout.in_step)


def _sums_at_once(layout: Schedule, cluster: ClusterSpec) -> int:
    """Of each block of C, the parts of k that a worker has summed, or sums, before they are added.

    Parts that it takes in turn, a thread each, are added in a binary tree meanwhile.
    """
    each = crowd(layout, cluster)
    in_turn = layout.in_turn(cluster.workers)
    return min(each, products_at_once(layout, cluster) + each.bit_length()) if in_turn else each


def _sliced(layout: Schedule) -> int:
    """Bytes of sums of slices of k, of a product that cuts k for itself."""
    sides = layout.largest.m + layout.largest.n
    itemsize = layout.problem.sum_bytes
    block = _block(layout) * itemsize
    slices = layout.largest.k * sides // SLICED_SHARE * itemsize // block
    return max(SLICED, min(SLICES, slices) * block * (slices > 1))


def _made_when_due(layout: Schedule, cluster: ClusterSpec) -> bool:
    """Whether Dask has chunks of operands made right before the one product that needs them.

    In a process without workers it puts all tasks in order itself.
    """
    return layout.queued or layout.by_block or (bounds_blocks(cluster) and layout.made_once)


def _made_for_one(layout: Schedule, cluster: ClusterSpec, role: str) -> bool:
    """The same of one operand, beside another one that is kept for several products."""
    by_itself = not (layout.in_step or layout.by_block) and role in layout.made_for_one
    return bounds_blocks(cluster) and by_itself


def _k_tiles(layout: Schedule, cluster: ClusterSpec, each: int) -> Terms:
    """Of k-tiles of the operands that `each` places of a worker need: none of it can be spilled."""
    terms: Terms = {}
    if _made_when_due(layout, cluster):  # of each product, and where Dask queues of the next one
        ahead = WINDOW if layout.queued or layout.by_block else 1
        used = layout.operands.first_use.items()
        return {f"{role.upper()} in use": ahead * each * size for role, size in used}
    for role, k_tile_bytes in layout.operands.in_use.items():
        if _made_for_one(layout, cluster, role):
            products = products_at_once(layout, cluster)
            terms[f"{role.upper()} in use"] = products * layout.operands.first_use[role]
            continue
        at_once = min(layout.k_tiles_per_task, layout.steps)
        arrives = layout.operands.arrives(role)
        if arrives or layout.in_step:  # of one task, and the next one's
            at_once = min(WINDOW * at_once, max(WINDOW, layout.steps))
        name = f"{role.upper()} in {'flight' if arrives else 'use'}"
        terms[name] = at_once * each * k_tile_bytes
    return terms


def _received(layout: Schedule, cluster: ClusterSpec) -> Terms:
    """Of others' sums of parts of k.

    Of the workers with a part of the same sum, one receives the others', and another one of the
    next sum. Those of a row panel are still being added when the next one begins.
    """
    if layout.parts == 1 or cluster.workers == 1:
        return {}
    block, at_once = _block(layout), min(layout.fan_in, layout.parts)
    received = (at_once - 1) * ceil_div(layout.work.most_in_row_panel, block * at_once) * block
    waiting = layout.work.most_in_row_panel if layout.row_panels > 1 else 0
    elements = crowd(layout, cluster) * (received + waiting + block)
    return {"sums received": elements * layout.problem.sum_bytes}


def _joined(layout: Schedule) -> Terms:
    """Of partial products of C's blocks that others have made."""
    elements = 0 if layout.in_place is None else layout.in_place.most_fetched
    return {"partial products received": elements * layout.problem.sum_bytes} if elements else {}


def _handed_out(layout: Schedule) -> Terms:
    """Of a block whose chunks are cut out, and of a chunk that is joined of several."""
    result = layout.result
    if not result.hands_out:
        return {}
    sides = [result.blocks] if result.cut_out else [result.blocks, result.chunks]
    elements = sum(prod(map(max, sizes)) for sizes in sides)
    return {"C handed out": elements * layout.problem.out_bytes}


def _changing(layout: Schedule, cluster: ClusterSpec) -> Terms:
    """Of blocks that threads convert, pack or join for a product, and of the C that they add."""
    p, k_tile, terms = layout.problem, layout.largest.k, Terms()
    products = products_at_once(layout, cluster)
    edges = {"a": layout.largest.rows, "b": layout.largest.n}
    at_once = {"a": layout.largest.m, "b": edges["b"]}
    if p.packs:  # of a stack one matrix at a time
        sides = sum(n * (p.packed_bytes(x) + p.written(x)) for x, n in at_once.items())
        length = min(k_tile, RESIDUE_K) if p.by_residues else k_tile
        terms["operands being packed"] = products * length * sides
    edges["b"] *= max(share.matrices for share in layout.shares("b"))
    held = {p.accumulate, "float32"} if p.packs and p.real_products > 1 else {p.accumulate}
    other = [role for role in edges if layout.spec(role).dtype not in held]
    if p.exact and not p.packs:
        sides = sum(edges.values()) * EXACT_BYTES[p.exact]
        terms["operands being converted"] = products * min(k_tile, EXACT_K) * sides
    elif other and not p.exact:
        sides = sum(edges[role] for role in other) * p.sum_bytes
        terms["operands being converted"] = products * k_tile * sides
    if cut := layout.operands.cut_within * (1 + layout.mirrors):  # which serves both sides
        sides = sum(edges[role] * layout.spec(role).itemsize for role in cut)
        joined = k_tile * sides + layout.operands.joined_small
        terms["operands being joined"] = products * joined
    if p.from_host:
        most = max(edges[role] * layout.spec(role).itemsize for role in layout.roles)
        terms["operands being joined"] = AT_ONCE * k_tile * most
    if p.c is not None:
        terms["C in use"] = products * _block(layout) * p.c.itemsize
    return terms


def _kept(layout: Schedule, cluster: ClusterSpec, each: int, k_tiles: Terms) -> Terms:
    """Of the operands that `each` places of a worker keep, but for what they have in use."""
    terms: Terms = {}
    for role, size in layout.operands.kept.items():
        if layout.in_step or (layout.stream and layout.problem.rereadable["ab".index(role)]):
            continue
        name, owner = role.upper(), each * size
        used = k_tiles.get(f"{name} in use", 0)
        # What comes as a single chunk is for all products, from the first to the last.
        chunked = layout.queued or layout.spec(role).blocks > 1
        due = chunked and not layout.by_block and _made_when_due(layout, cluster)
        due = due or _made_for_one(layout, cluster, role)
        if due or _used_at_once(layout, cluster, role):
            owner = min(owner, SHORT * int(used))
        if role in layout.operands.packed:
            elements = owner // layout.spec(role).itemsize
            packed = elements * layout.problem.packed_itemsize
            terms |= {f"{name} kept": owner, f"packed {name}": packed - used}
        else:
            terms[f"{name} kept"] = owner - used
    return terms


def _used_at_once(layout: Schedule, cluster: ClusterSpec, role: str) -> bool:
    """Whether each block of an operand is made by a task when the one that multiplies it is due."""
    p = layout.problem
    at = "ab".index(role)
    lies = layout.spec(role).owners and not p.made_in_place[at]
    made = p.awaited and not p.rereadable[at] and not lies
    in_turn = cluster.threads == 1 or layout.links <= SHORT
    return made and in_turn and layout.work.count == 1


def _cut_before(layout: Schedule, cluster: ClusterSpec) -> Terms:
    """Of the operands that tasks of their own bring into other blocks: what they come in."""
    terms: Terms = {}
    for role in layout.operands.cut_apart:
        spec, name = layout.spec(role), role.upper()
        terms[f"{name} as it comes"] = spec.fullest or spec.nbytes / cluster.workers
        if layout.grid.workers > 1:  # coalesced transfers, at one end or the other
            terms[f"{name} on its way"] = layout.operands.kept[role]
    return terms


def _addend(layout: Schedule, cluster: ClusterSpec, needed: float) -> Terms:
    """Bytes of the C that is added on the fullest worker, which needs so many of it."""
    c, grid = layout.spec("c"), layout.grid
    if not layout.cuts_c and not c.owners:  # made where it is needed
        return {"C as it comes": needed}
    chunks = ceil_div(c.blocks, min(cluster.workers, grid.workers))
    in_place = c.fullest or min(c.nbytes, chunks * prod(map(max, c.chunks)) * c.itemsize)
    terms: Terms = {"C as it comes": in_place}
    if grid.workers > 1 or layout.lies_beyond("c"):
        coalesced_transfers = in_place * layout.cuts_c  # that wait to be fetched
        arrives = needed * (layout.cuts_c or layout.fetched_c > 0)
        terms["C on its way"] = coalesced_transfers + arrives
    return terms
