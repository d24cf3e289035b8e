"""Planted faults: what a user would suffer from if planning, graph or memory were wrong.

Each fault is a line of multimm changed, and tests that find it. A text that is no longer in its
file is an error: whoever rewrites the code plants the fault anew, in the same sense.

    python tests/planted_faults.py               plants all, one after another: minutes
    python tests/planted_faults.py barriers last    those whose descriptions have one of these words
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
#: Of the checkout, what tests need.
COPIED = (
    *("multimm", "multimm_benchmarks", "kernels", "tests", "benchmarks", "docs"),
    *("README.md", "pyproject.toml"),
)
#: A fault may have tasks wait for ever: then the process is ended, which finds it, too.
LONGEST = ("--timeout=240", "--timeout-method=thread")


class Fault(NamedTuple):
    """A change of one file that some test has to notice.

    Parameters
    ----------
    what : str
        What would be wrong.
    file : str
        Below multimm/.
    old, new : str
        A text that is there once, and what is put in its place.
    tests : str
        Files of tests/ by their names without ``test_``, and what else chooses tests: ``-k ...``.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def arguments(self) -> list[str]:
        """Of pytest."""
        files, _, chosen = self.tests.partition(" -k ")
        return [f"tests/test_{name}.py" for name in files.split()] + ["-k", chosen] * bool(chosen)

    def planted(self, text: str) -> str:
        """The file's text with the fault in it.

        Raises
        ------
        ValueError
            Where the old text is not there, or more than once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.what!r}: found {count} times in {self.file}: {self.old!r}")
        return text.replace(self.old, self.new)


PLANNING = (
    Fault(
        "bytes of partial sums are left out of the closed form",
        "planning/cost/communication.py",
        "sums = _sums(problem) * (grid.p_k - 1)",
        "sums = _sums(problem) * (grid.p_k - 2)",
        "planning golden -k closed_form or golden",
    ),
    Fault(
        "what travels to make chunks of C of others' blocks is forgotten",
        "planning/plan.py",
        "self.bytes_recut + self.bytes_added + self.bytes_joined",
        "self.bytes_recut + self.bytes_added",
        "traffic",
    ),
    Fault(
        "what a worker keeps is counted as if it travelled",
        "planning/cost/counted_transfers.py",
        "if lacks := together - kept.get(user, 0):",
        "if lacks := together:",
        "traffic",
    ),
    Fault(
        "the busiest worker is taken to receive an even share",
        "planning/cost/communication.py",
        "return Moved(sum(counted.values()), max(counted.values(), default=0))",
        "return Moved(sum(counted.values()), sum(counted.values()) / workers)",
        "golden",
    ),
    Fault(
        "the last block of a side is lost where it is smaller",
        "planning/tiling/grid.py",
        "return (block,) * full + ((rest,) if rest else ())",
        "return (block,) * full",
        "graph",
    ),
    Fault(
        "sums of all blocks are kept by the first worker of their place",
        "planning/tiling/grid.py",
        "at = turn % len(group)",
        "at = 0",
        "planning -k merges or owners",
    ),
    Fault(
        "a tree over parts of k leaves the last one out",
        "planning/tiling/grid.py",
        "groups = [slots[i : i + fan_in] for i in range(0, len(slots), fan_in)]",
        "groups = [slots[i : i + fan_in] for i in range(0, len(slots) - len(slots) % 2, fan_in)]",
        "graph",
    ),
    Fault(
        "parts of k are assigned out in turn, so that their order depends on the workers",
        "planning/tiling/grid.py",
        "for part, size in enumerate(even(k_tiles, p_k)) for _ in range(size))",
        "for part, size in enumerate(even(k_tiles, p_k)[::-1]) for _ in range(size))",
        "graph planning -k bits or contiguous",
    ),
    Fault(
        "a plan with workers left out is never better",
        "planning/choice.py",
        "(with_fewer(problem, cluster, options, all_work) or found) | placed",
        "found | placed",
        "owners golden",
    ),
    Fault(
        "after a first look nothing is searched for, however slow what it found",
        "planning/choice.py",
        "    if later <= SEARCH_S[cluster.slowest.kind]:\n",
        "    if True:\n",
        "small_chunks golden",
    ),
    Fault(
        "layouts in place are left out that might be preferred",
        "planning/choice.py",
        "return NEARLY * best.seconds + later",
        "return 0.5 * best.seconds",
        "golden",
    ),
    Fault(
        "other arrangements that look better are not searched for",
        "planning/choice.py",
        "if best <= HOPELESS * rank.seconds:",
        "if False:",
        "small_chunks golden",
    ),
    Fault(
        "a slower plan wins where it was to give way",
        "planning/choice.py",
        "return best if faster or FEWER * new.moved < old.moved else other",
        "return other if faster or FEWER * new.moved < old.moved else best",
        "golden",
    ),
    Fault(
        "products of a hundred times the size are one task",
        "planning/choice.py",
        "return seconds <= SMALL_SECONDS and size",
        "return seconds <= 100 * SMALL_SECONDS and size",
        "golden",
    ),
    Fault(
        "blocks are looked for in turn, wherever they lie",
        "planning/distribution.py",
        "self._owners[at] = self._lie(*at) or self._in_turn(*at)",
        "self._owners[at] = self._in_turn(*at)",
        "traffic",
    ),
    Fault(
        "owners of a transposed operand are read as if it were not",
        "planning/matrix.py",
        "for owner in self.owners[start + col : start + rows * cols : cols]",
        "for owner in self.owners[start + col * rows : start + (col + 1) * rows]",
        "owners",
    ),
    Fault(
        "a lazy product names the wrong workers for its blocks",
        "planning/result.py",
        "return tuple(rank % workers for rank in ranks)",
        "return tuple((rank + 1) % workers for rank in ranks)",
        "owners",
    ),
    Fault(
        "C that lies elsewhere is added for nothing",
        "planning/schedule.py",
        "if lies != self.completes(*divmod(at, columns))",
        "if lies < 0",
        "rechunk",
    ),
    Fault(
        "blocks of a symmetric product are computed above the diagonal, too",
        "planning/tiling/triangle.py",
        "yield SubBlock(slice(middle, end), slice(start, middle))",
        "yield SubBlock(slice(start, end), slice(start, end))",
        "symmetric",
    ),
    Fault(
        "what has no room is taken to be spilled for nothing",
        "planning/cost/time.py",
        '"spilling": 2 * spilled / SPILL_RATE[device.kind],',
        '"spilling": 0.0 * spilled,',
        "golden",
    ),
    Fault(
        "transfers are added to what they run beside",
        "planning/cost/time.py",
        "longest = max(side_by_side)",
        "longest = sum(side_by_side)",
        "golden",
    ),
    Fault(
        "absurd problems are laid out before they are refused",
        "planning/limits.py",
        "if needed > BEYOND * have:",
        "if needed > 1e9 * BEYOND * have:",
        "bounds",
    ),
)

MEMORY = (
    Fault(
        "one k_tile in flight is planned for, where two are",
        "planning/cost/memory.py",
        "at_once = min(WINDOW * at_once, max(WINDOW, layout.steps))",
        "at_once = at_once / 2",
        "memory",
    ),
    Fault(
        "the finished blocks of C take no memory",
        "planning/cost/memory.py",
        'finished: Terms = {"C finished": (',
        'finished: Terms = {"C finished": 0 * (',
        "golden",
    ),
    Fault(
        "partial sums take no memory",
        "planning/cost/memory.py",
        '"partial sums": _sums_at_once(layout, cluster)',
        '"partial sums": 0',
        "memory",
    ),
    Fault(
        "the C that is added takes no memory",
        "planning/cost/memory.py",
        'terms: Terms = {"C as it comes": in_place}',
        'terms: Terms = {"C as it comes": 0}',
        "memory -k added",
    ),
    Fault(
        "more of C may be on its way from a GPU than has room",
        "planning/cost/memory.py",
        'return int(room["C coming back"]) - _perhaps_made(layout, cluster) * block',
        'return int(room["C coming back"]) + _perhaps_made(layout, cluster) * block',
        "memory -k leave_a_gpu",
    ),
    Fault(
        "what must stay does not count beside what may be spilled",
        "planning/cost/memory.py",
        "return max(0.0, sum(stay.values()) + sum(spill.values()) - cluster.budget_bytes)",
        "return max(0.0, max(sum(stay.values()), sum(spill.values())) - cluster.budget_bytes)",
        "planning golden",
    ),
    Fault(
        "storage chunks that are decoded take no memory",
        "planning/cost/reading.py",
        "return cluster.threads * each",
        "return 0 * each",
        "storage_chunks",
    ),
    Fault(
        "threads make operands long before these are needed",
        "planning/candidates/read_ahead.py",
        "if not made_by_tasks(layout) or layout.k_parts or layout.links <= most:",
        "if True:",
        "read_ahead",
    ),
    Fault(
        "chunks that tasks make are joined without bound",
        "planning/tiling/counts.py",
        "if made[0] and len(b.chunks[-1]) == 1:",
        "if False:",
        "consumers -k many_small",
    ),
    Fault(
        "workers make all chunks of an operand at once",
        "planning/candidates/read_ahead.py",
        "if not (several and made_by_tasks(layout) and layout.made_once)",
        "if True",
        "consumers -k on_workers",
    ),
    Fault(
        "an impure operand is made anew in each row panel",
        "products.py",
        "if unsure(self.a) & unsure(self.b):",
        "if False:",
        "made_again -k made_of",
    ),
    Fault(
        "what the process holds already is planned with",
        "cluster/local.py",
        "process_bytes=min(limit, -(-held // step) * step),",
        "process_bytes=0,",
        "cluster -k local",
    ),
    Fault(
        "a limit of the address space is not seen",
        "cluster/local.py",
        "if bound != resource.RLIM_INFINITY and bound - own.vms < limit - held:",
        "if False:",
        "cluster -k local",
    ),
    Fault(
        "all blocks of C may leave a GPU at once",
        "graph/tasks/host_offload.py",
        "if len(together) > 1 and total > min(each.limit for each in together):",
        "if len(together) > 1 and total > max(each.limit for each in together):",
        "leaving",
    ),
    Fault(
        "products begin while blocks of C wait to leave a GPU",
        "graph/tasks/host_offload.py",
        "    _leaving.wait_for_room()\n",
        "",
        "multiply_beside",
    ),
    Fault(
        "the worker's thread waits with a product",
        "graph/tasks/host_offload.py",
        "        give_up_thread()\n        return",
        "        return",
        "multiply_beside",
    ),
    Fault(
        "a product runs on the GPU beside the one before",
        "graph/streams.py",
        "            stream.wait_event(_launched[device])\n",
        "            pass\n",
        "streams",
    ),
    Fault(
        "memory that was freed on stream 0 is written to before its kernels are done",
        "graph/streams.py",
        "        if pointer.ptr:\n            self.follow_stream_0()\n",
        "",
        "streams",
    ),
    Fault(
        "memory that a kernel still uses goes back to the pool",
        "graph/streams.py",
        "if self._task.running:",
        "if not self._task.running:",
        "streams",
    ),
)

GRAPH = (
    Fault(
        "barriers wait for nothing: files are read as fast as they can be",
        "graph/lowering/backpressure.py",
        "for row, j in layout.behind(barrier):",
        "for row, j in ():",
        "graph -k stream",
    ),
    Fault(
        "barriers are forgotten, and a lost worker has sums added up again",
        "graph/lowering/task_graph.py",
        "if layout.stream:\n            self.barriers.keep()",
        "if False:\n            self.barriers.keep()",
        "faults -k streamed",
    ),
    Fault(
        "a slice of C needs every task that a barrier waits for",
        "graph/data_location.py",
        "if task.label.kind is Kind.WAIT:",
        "if task is None:",
        "graph_tools -k slice",
    ),
    Fault(
        "alpha is applied to every product of a chain",
        "graph/tasks/multiply.py",
        "return replace(self, alpha=1, beta=0,",
        "return replace(self, beta=0,",
        "gemm",
    ),
    Fault(
        "the sum begins anew with every k_tile",
        "graph/lowering/task_graph.py",
        "            previous = TaskRef(key)\n",
        "",
        "matmul",
    ),
    Fault(
        "products with other scalars share their results",
        "graph/array.py",
        "plan.precision, step, cluster.numbers)",
        "plan.precision, cluster.numbers)",
        "graph lazy",
    ),
    Fault(
        "the mirrored block of a symmetric product is not transposed",
        "graph/lowering/symmetric.py",
        "    block = block.swapaxes(-1, -2)\n",
        "",
        "symmetric",
    ),
    Fault(
        "the mirrored block of a Hermitian product with a C is not conjugated",
        "graph/lowering/symmetric.py",
        "return block.conj() if step.hermitian else block",
        "return block",
        "conjugates",
    ),
    Fault(
        "the mirrored block of a Hermitian product is not conjugated",
        "graph/lowering/task_graph.py",
        "turn = adjoint if self.step.hermitian else transpose",
        "turn = transpose",
        "conjugates",
    ),
    Fault(
        "a block is copied by each of the tasks that take it",
        "graph/taken_apart.py",
        "(uses <= most or change.views)",
        "uses > 0",
        "rearranged -k copied",
    ),
    Fault(
        "a task makes blocks that other tasks take, too",
        "graph/taken_apart.py",
        "uses[key] == 1 and",
        "uses[key] and",
        "rearranged -k step_before",
    ),
    Fault(
        "a block that a worker needs for both sides is counted twice",
        "planning/cost/counted_transfers.py",
        "return bool(same) and len(blocks) == 1",
        "return not same and len(blocks) == 1",
        "traffic -k 28",
    ),
    Fault(
        "a Hermitian product is mirrored that a complex alpha makes another one",
        "products.py",
        "return kept and self._same",
        "return self._same",
        "conjugates",
    ),
    Fault(
        "a conjugate is taken off and forgotten",
        "graph/lazy_views.py",
        "conjugated = not conjugated",
        "conjugated = False",
        "conjugates",
    ),
    Fault(
        "a conjugated left operand leaves the squares of the right one as they are",
        "gpu/elementwise/complex_parts.py",
        "across = (right, -right * left)",
        "across = (right, -right)",
        "complex",
    ),
    Fault(
        "what a complex operand is written as takes no memory",
        "planning/cost/memory.py",
        "p.packed_bytes(x) + p.written(x)",
        "p.packed_bytes(x)",
        "planning -k complex",
    ),
    Fault(
        "sub_blocks of a coalesced are taken from its beginning",
        "graph/lowering/sub_blocks.py",
        "Part(key, (ends[-1],), (slice(*span),), sub_block.to)",
        "Part(key, (ends[-1],), (slice(0, span[1] - span[0]),), sub_block.to)",
        "traffic",
    ),
    Fault(
        "a block of another shape than its array's chunks say is multiplied",
        "graph/block_task.py",
        "if found != planned:",
        "if found is None:",
        "failures",
    ),
    Fault(
        "tasks may be stolen from their workers",
        "graph/scheduler/pinning.py",
        "ts.loose_restrictions = False",
        "ts.loose_restrictions = True",
        "placement -k steal",
    ),
    Fault(
        "restrictions that the user set are overwritten",
        "graph/scheduler/pinning.py",
        "(by is None and not restricted)",
        "by is None",
        "placement",
    ),
    Fault(
        "tasks run in Dask's order, which holds whole panels",
        "graph/scheduler/pinning.py",
        "    _reorder(order)\n\n\ndef _pin(",
        "\n\ndef _pin(",
        "placement",
    ),
    Fault(
        "what uses a block of C comes long after it",
        "graph/scheduler/pinning.py",
        "    _follow(tasks, order)\n",
        "",
        "consumers",
    ),
    Fault(
        "a plugin that fails leaves tasks pinned",
        "graph/scheduler/plugin.py",
        "            self.release_all(self.scheduler)\n",
        "",
        "placement",
    ),
    Fault(
        "a worker that joins gets nothing to do",
        "graph/scheduler/product_state.py",
        "if load[busiest] <= load[joined] + 1:",
        "if load[busiest] <= load[joined] + 9:",
        "placement",
    ),
    Fault(
        "the part of a lost worker goes to its own host, which may be going",
        "graph/scheduler/product_state.py",
        "hosts[a] == host, a)",
        "hosts[a] != host, a)",
        "faults -k heirs",
    ),
    Fault(
        "tasks of a lost worker wait for it for ever",
        "graph/scheduler/failover.py",
        'wanted[key] = "processing"',
        "pass",
        "faults -k killed_worker_does_not_change_the_product",
    ),
    Fault(
        "blocks are fetched as early as they can be",
        "graph/scheduler/product_state.py",
        "return len(self._first) < 2 or step <= self._first[1]",
        "return True",
        "prefetch",
    ),
    Fault(
        "the last copy of a block is dropped",
        "graph/scheduler/replicas.py",
        "or product.address(owner) == worker.address:",
        "or False:",
        "memory -k k_tile_by_k_tile",
    ),
    Fault(
        "copies of blocks stay until Dask looks for them",
        "graph/scheduler/replicas.py",
        "if copies > 1 and not",
        "if copies > 99 and not",
        "prefetch memory rechunk",
    ),
    Fault(
        "Dask drops copies that a product waits for",
        "graph/scheduler/replicas.py",
        "if not any(ours(user) for user in suggestion.ts.waiters or ()):",
        "if True:",
        "replicas",
    ),
)

INTEGERS = (
    Fault(
        "integers: the high bytes of 16 bits count as much as the low ones",
        "gpu/integers/in_bytes.py",
        "total <<= _BITS",
        "pass",
        "integer_cores -k bytes",
    ),
    Fault(
        "integers: float sums leave the integers that float32 holds",
        "gpu/integers/float_blas.py",
        "length = min(terms(end_a, end_b, held), longest",
        "length = min(2 * terms(end_a, end_b, held), longest",
        "dtype -k exact or beyond",
    ),
    Fault(
        "schedule: row panels wait for each other without workers",
        "planning/schedule.py",
        "if self.stream or self.alone or row_panel == 0:",
        "if self.stream or row_panel == 0:",
        "made_again -k random",
    ),
    Fault(
        "schedule: what is read for a block of C is kept for others",
        "graph/lowering/operand_blocks.py",
        "if layout.by_block and operand.reader is not None:",
        "if False:",
        "made_again -k at_once",
    ),
    Fault(
        "schedule: blocks of C take all of k one after another",
        "graph/lowering/task_graph.py",
        "if layout.in_step and (barrier := layout.barrier(place.owner, 0, first)):",
        "if False and (barrier := layout.barrier(place.owner, 0, first)):",
        "made_again -k products_alone",
    ),
    Fault(
        "integers: a product of digits that counts is left out",
        "gpu/integers/digits.py",
        "if pair[-1] < bits]",
        "if pair[-1] < bits - 16]",
        "dtype -k wide",
    ),
    Fault(
        "integers: the tensor cores sum twice as much as float32 holds",
        "gpu/integers/tensor_cores.py",
        'promote = terms(most_a, most_b, HELD["float32"]) // SLAB',
        'promote = terms(most_a, most_b, 2 * HELD["float32"]) // SLAB',
        "integer_cores -k plans or products",
    ),
    Fault(
        "integers: sums of a float32 result wrap around in int32",
        "gpu/integers/bounds.py",
        'return int32 if sums_fit(a, b, k, int32) else np.dtype("float64")',
        "return int32",
        "dtype -k beyond",
    ),
    Fault(
        "integers: whole scalars take sums beyond int32",
        "gpu/dtypes.py",
        "(alpha if alpha == 1 else alpha * 1.0)",
        "alpha",
        "dtype -k scalars",
    ),
)

CONTRACTIONS = [
    Fault("rows and columns of one array twice are cut in different blocks",
          "contractions/einsum_chunks.py", "alike = len({made[x] for x in together}) == 1",
          "alike = False", "einsum_chunks -k twice"),
    Fault("the order in which axes are summed over is each operand's own", "contractions/pair.py",
          "right = _matrix(b, found.batch, summed, found.columns, chunks)",
          "right = _matrix(b, found.batch, _in_order(b.labels, summed), found.columns, chunks)",
          "contractions -k other_chunks"),
    Fault("axes that are summed over are flattened in different chunks", "contractions/pair.py",
          "        chunks = chunks | shared\n", "", "contractions -k other_chunks"),
    Fault("flattened blocks are said to lie elsewhere", "graph/rearranged.py",
          "        numbers.append(number_of(source, array.numblocks))\n"
          "    return _array(array, tasks, name, final, numbers)\n\n\ndef split",
          "        numbers.append(number_of(source[::-1], array.numblocks[::-1]))\n"
          "    return _array(array, tasks, name, final, numbers)\n\n\ndef split", "rearranged"),
    Fault("narrow integers wrap around before they are added to wide ones", "contractions/steps.py",
          "        if not self.asked and common_dtype(*own) == self.dtype:",
          "        if not self.asked:",
          "contractions -k beside_a_wide"),
    Fault("a function of whole blocks counts as elementwise", "graph/same_values.py",
          "    if isinstance(func, np.ufunc):\n", "    if callable(func):\n        return True\n"
          "    if isinstance(func, np.ufunc):\n", "same_values"),
    Fault("which axis of an operand is which is not compared", "graph/same_values.py",
          "        return self._numbered((name, axes))", "        return self._numbered((name,))",
          "same_values"),
    Fault("other blocks of an array count as its first ones", "graph/same_values.py",
          "        if task.args[0].key != (source, *(at[n] for n in kept)):", "        if not at:",
          "same_values"),
    Fault("opt_einsum keeps Dask's own functions", "dispatch.py",
          "            self.originals.append((owner, name, original, wrapper))\n"
          "        _forget_what_opt_einsum_found()\n",
          "            self.originals.append((owner, name, original, wrapper))\n", "dispatch"),
]  # fmt: skip
WIDE_RANGE = [
    Fault("a wide range: the second half of k forgets the first", "gpu/emulated/broad.py",
          "d if i else addend", "addend", "tensor_cores -k wide_range"),
    Fault("a wide range: its parts have the memory of FP16 parts", "gpu/emulated/gemm.py",
          "tiles = max(tiles, broad.tile_bytes(source, scheme))", "pass",
          "tensor_cores -k wide_range"),
    Fault("a wide range: what its parts lose is taken for carried", "gpu/cuda/broad_pack.cu",
          "lost |= !carried && given[e] != 0.0f;", "lost |= false;", "cuda_on_cpu -k broad"),
    Fault("a wide range: two kernels compute one product", "gpu/cuda/common/refused.cuh",
          "counts[4] != 0 && counts[5] == 0 ?", "counts[4] == 0 ?", "cuda_on_cpu -k add_partials"),
]  # fmt: skip
READING = [
    Fault("a product of what needs all of X before reads X once", "graph/shared_reads.py",
          "if fit and _block_by_block(y, name) else x", "if fit else x", "shared_reads"),
    Fault("blocks of an array that is another's lie anywhere", "products.py",
          "owners = cluster.ranks(makers_of(x, beside, cluster.workers))", "owners = ()", "owners"),
]  # fmt: skip
TRANSPORT = (
    Fault(
        "memory of another process with the same number is taken for a block",
        "cluster/plugins/host_memory.py",
        " or mark.tobytes() != process.mark",
        "",
        "host_memory",
    ),
    Fault(
        "forked processes cannot be told apart",
        "cluster/plugins/host_memory.py",
        "os.register_at_fork(after_in_child=_mark_this_process)\n",
        "",
        "host_memory",
    ),
    Fault(
        "parts of a long block are read from its beginning",
        "cluster/plugins/host_memory.py",
        "(address + start, nbytes)",
        "(address, nbytes)",
        "host_memory",
    ),
    Fault(
        "a task has a block before it is filled, and its owner may forget it",
        "cluster/plugins/families.py",
        "await asyncio.gather(*map(begin, copies))",
        "asyncio.gather(*map(begin, copies))",
        "families",
    ),
    Fault(
        "the owner of a block may forget it while others copy it",
        "cluster/plugins/families.py",
        """            await asyncio.gather(*map(begin, copies))
            if response["status"] == "OK":
                await comm.write("OK")
""",
        """            if response["status"] == "OK":
                await comm.write("OK")
            await asyncio.gather(*map(begin, copies))
""",
        "families",
    ),
    Fault(
        "who could not copy a block leaves its owner waiting, on a connection that is used again",
        "cluster/plugins/families.py",
        "            comm.abort()  # the sender still waits for an answer\n",
        "",
        "families",
    ),
    Fault(
        "a worker that is being closed drops blocks that others copy, and they take what is there",
        "cluster/plugins/host_memory.py",
        "        _mark_this_process()\n",
        "        pass\n",
        "host_memory",
    ),
    Fault(
        "who waits for a block that may be read no more waits for ever",
        "cluster/plugins/host_memory.py",
        " and error.errno in LOST",
        "",
        "host_memory",
    ),
    Fault(
        "blocks of another host are looked for on this one",
        "cluster/plugins/families.py",
        "return len(ends) == 1",
        "return True",
        "families host_memory",
    ),
)

FAULTS = (
    *(*READING, *PLANNING, *MEMORY, *GRAPH, *INTEGERS, *CONTRACTIONS, *WIDE_RANGE),
    *TRANSPORT,
)


def run_tests(tree: Path, arguments: Iterable[str]) -> tuple[int, str]:
    """Pytest's status in a tree, and what it said last."""
    command = (sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider")
    run = subprocess.run(
        [*command, *LONGEST, *arguments], cwd=tree, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1",
             "MULTIMM_TEST_CACHE": str(tree / ".cache"), "HYPOTHESIS_PROFILE": "ci"},
    )  # fmt: skip
    said = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return run.returncode, "; ".join(said) or run.stdout[-2000:] + run.stderr[-2000:]


def plant(faults: list[Fault], tree: Path) -> int:
    """Plant one fault after another in a tree; how many were not noticed."""
    missed = 0
    for fault in faults:
        path = tree / "multimm" / fault.file
        text, begun = path.read_text("utf-8"), time.monotonic()
        path.write_text(fault.planted(text), "utf-8")
        try:
            status, said = run_tests(tree, fault.arguments)
        finally:
            path.write_text(text, "utf-8")
        caught = status == 1  # else nothing failed, or pytest could not begin
        missed += not caught
        seconds = time.monotonic() - begun
        print(f"{'caught' if caught else 'MISSED'}  {seconds:4.0f} s  {fault.what}", flush=True)
        print(f"        {said[:160] if caught else said}", flush=True)
    return missed


def without(faults: list[Fault], tree: Path) -> None:
    """See that the same tests pass without any fault: else they find nothing."""
    for arguments in dict.fromkeys(tuple(fault.arguments) for fault in faults):
        status, said = run_tests(tree, arguments)
        if status:
            raise SystemExit(f"without a fault {' '.join(arguments)} fails: {said}")


def main(words: list[str]) -> int:
    """From the command line; the status is 1 where a fault was missed."""
    faults = [x for x in FAULTS if not words or any(word in x.what for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, symlinks=True)
            else:
                shutil.copy(ROOT / name, tree / name)
        without(faults, tree)
        missed = plant(faults, tree)
    print(f"{len(faults) - missed} of {len(faults)} planted faults caught")
    return int(missed > 0 or not faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
