"""The tasks that hand C out in its chunks: see `multimm.planning.tiling.result_chunks`.

Chunks have memory of their own: of a slice of a block all of the block would stay in memory, of
which Dask counts the slice alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from multimm.graph.block_task import Block, BlockTask, Key, Place
from multimm.graph.label import Kind
from multimm.graph.lowering.rechunk import cutting, join
from multimm.graph.lowering.sub_blocks import task_of
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.tiling.rechunk import Index
from multimm.planning.tiling.result_chunks import Chunk, senders

#: Behind the order of the task that makes a block: its chunks are made before anything else is.
AFTER = 1


def handed_out(keys: Keys, made: Mapping[Key, BlockTask]) -> dict[Key, BlockTask]:
    """Tasks that make the chunks of C of the blocks that other tasks make, by key."""
    found: dict[Key, BlockTask] = {}
    for chunk in keys.layout.result.handed_out:
        _hand_out(chunk, keys, made, found)
    return found


def _hand_out(
    chunk: Chunk,
    keys: Keys,
    made: Mapping[Key, BlockTask],
    found: dict[Key, BlockTask],
) -> None:
    """Add the tasks of one chunk."""

    def block(at: Index) -> Key:
        return (keys.name("matmul"), *at)

    def placed(rank: int) -> Place:
        return keys.place(keys.layout.grid.place(rank), when)

    label = keys.label(Kind.HAND_OUT, block=chunk.at)
    own = {
        rank: [part._replace(of=block(part.of)) for part in parts]
        for rank, parts in chunk.parts.items()
    }
    orders = (made[part.of].place.order for part in chain(*own.values()))
    when = (*max(orders), AFTER)
    for rank in senders(own, chunk.owner):
        key: Key = (keys.name("cut-matmul"), *chunk.at, rank)
        found[key] = cutting(key, own, rank, chunk.where, None, label, placed(rank))
    sub_blocks = [*chain(*own.values())]
    verb = as_it_is if len(sub_blocks) == 1 and sub_blocks[0].whole else join
    key, parts = (keys.name("chunk"), *chunk.at), task_of(sub_blocks, chunk.where, None)
    found[key] = BlockTask(key, verb, parts, label=label, place=placed(chunk.owner))


def as_it_is(parts: SubBlocks) -> Block:
    """A chunk that is a block."""
    return parts.blocks[0]
