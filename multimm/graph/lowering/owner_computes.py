"""The tasks of a product whose large operand is multiplied where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

from dask._task_spec import List, TaskRef

from multimm.graph.block_task import BlockTask, Key, together
from multimm.graph.label import Kind
from multimm.graph.lowering.moving_operand import SmallOperand
from multimm.graph.lowering.operand import Operand
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.multiply import Step
from multimm.graph.tasks.partial_products import Recipe, join_partial_products, partial_product
from multimm.planning.tiling.grid import Coordinate
from multimm.planning.work.owner_computes import OwnerComputes
from multimm.planning.work.partial_products import Group
from multimm.shapes import Shape


@dataclass(frozen=True)
class Gatherer:
    """Makes the tasks: one for each partial product, and for each block of C that has several."""

    own: OwnerComputes
    operands: list[Operand]
    step: Step
    keys: Keys

    def tasks(self) -> dict[Key, BlockTask]:
        """Every task of the product, by key."""
        own, made = self.own, [*self.small.tasks]
        made += [self._partial_product(*own.of(*pair)) for pair in own.pairs]
        made += [self._joined(*at) for at in own.joined]
        return {task.key: task for task in made}

    @property
    def large(self) -> Operand:
        """What is multiplied where it lies."""
        return self.operands[self.own.partial_products.by_columns]

    @cached_property
    def small(self) -> SmallOperand:
        """What travels."""
        operand = self.operands[not self.own.partial_products.by_columns]
        return SmallOperand(self.own, operand, self.keys)

    @cached_property
    def inner(self) -> Step:
        """Of sums that are not finished yet: one for all tasks, which travels with them once."""
        return self.step.inner

    @cached_property
    def chunks(self) -> list[tuple[Key, Shape, Coordinate]]:
        """Key, shape as stored, and place of each chunk of the large operand, in the order of its
        owners. Those of a lazy one are made there.
        """
        owners, operand = self.own.laid.owners, self.large
        turn = -1 if self.own.partial_products.by_columns ^ operand.transposed else 1
        places = {rank: self.keys.layout.grid.place(rank) for rank in {*owners}}
        at = product(*map(enumerate, operand.own_chunks[::turn]))
        return [
            (operand.key((i, s)[::turn]), (height, width)[::turn], places[owner])
            for ((i, height), (s, width)), owner in zip(at, owners, strict=True)
        ]

    def _partial_product(self, number: int, across: int) -> BlockTask:
        """What one worker makes of a block of C."""
        work, partial_products = self.own, self.own.partial_products
        groups = partial_products.made[number].groups
        small, recipe = self._recipe(groups, across)
        wide, k_tiles = len(partial_products.columns), partial_products.k_tiles
        at = [i * wide + k_tiles[s] for rows, own in groups for s in own for i in rows]
        keys, sizes, owners = zip(*(self.chunks[n] for n in at), strict=True)
        owner = Coordinate(*work.of(number, 0), 0)
        output_tile = number // partial_products.workers
        several = len(work.output_tiles[output_tile]) > 1
        return BlockTask(
            self.keys.partial_product(work, number, across),
            partial_product,
            List(*map(TaskRef, small)),
            List(*map(TaskRef, keys)),
            recipe=recipe,
            step=self.inner if several and work.adds else self.step,
            inner=self.inner,
            label=self.keys.label(
                Kind.PARTIAL if several else Kind.MULTIPLY, block=work.of(output_tile, across)
            ),
            place=self.keys.place(
                owner,
                (0, 0, Kind.MULTIPLY, *work.of(number, across)),
                (*together(small, small.values()), *together(keys, owners)),
            ),
            sizes=together(keys, sizes),
        )

    def _recipe(
        self, groups: tuple[Group, ...], across: int
    ) -> tuple[dict[Key, Coordinate], Recipe]:
        """What a partial product needs of the small operand, where it lies, and how it is made."""
        layout, partial_products = self.keys.layout, self.own.partial_products
        sizes = partial_products.rows
        used = sorted({s for group in groups for s in group.k_tiles})
        small, k_tiles = self.small.k_tiles(used, across)
        at = {s: n for n, s in enumerate(used)}
        recipe = Recipe(
            k_tiles,
            tuple(layout.k_tiles[s] for s in used),
            tuple(
                (tuple(sizes[i] for i in rows), tuple(at[s] for s in own)) for rows, own in groups
            ),
            partial_products.by_columns,
            partial_products.by_columns ^ self.large.transposed,
        )
        return small, recipe

    def _joined(self, output_tile: int, across: int) -> BlockTask:
        """A block of C."""
        layout, work = self.keys.layout, self.own
        at, numbers = work.of(output_tile, across), work.output_tiles[output_tile]
        keys = [self.keys.partial_product(work, number, across) for number in numbers]
        cells = [work.of(number, across) for number in numbers]
        sizes = [(layout.m_blocks[i], layout.n_blocks[j]) for i, j in cells]
        runs = [
            run._replace(found=tuple((numbers.index(n), rows) for n, rows in run.found))
            for run in work.partial_products.runs(output_tile)
        ]
        return BlockTask(
            (self.keys.name("matmul"), *at),
            join_partial_products,
            *map(TaskRef, keys),
            shape=tuple(blocks[i] for blocks, i in zip(work.sides, at, strict=True)),
            runs=tuple(runs),
            by_columns=work.partial_products.by_columns,
            step=self.step if work.adds else None,
            label=self.keys.label(Kind.ADD, block=at),
            place=self.keys.place(
                layout.owner(*work.cell(*at)), (0, layout.steps, Kind.MULTIPLY, *at)
            ),
            sizes=together(keys, sizes),
        )
