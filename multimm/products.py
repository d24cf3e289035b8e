"""From checked operands to a plan and a lazy product: what `matmul`, `gemm` and `plan` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from multimm.cluster.inspect.cluster_spec import described, listed_with
from multimm.cluster.local import local
from multimm.errors import OptionError
from multimm.gpu import library_gemm
from multimm.gpu.dtypes import on_devices
from multimm.graph.array import build
from multimm.graph.data_location import block_keys, owners_of, where_blocks_lie
from multimm.graph.lowering.host_downloads import below_download
from multimm.graph.lowering.operand import peel, reader_of, storage_of
from multimm.graph.tasks import multiply
from multimm.graph.tasks.half_precision import is_narrow, scheme_of
from multimm.operands import Array, arrays, as_dask, current_client, is_dask, named_dtype, on_gpu
from multimm.planning.choice import in_one_task, plan_matmul
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.options import Options
from multimm.planning.plan import MatmulPlan
from multimm.planning.problem import Problem
from multimm.planning.tiling.grid import Blocks

Scalar = complex
#: By the name of an array whose blocks are in memory: the addresses that have each of them.
Held = Mapping[str, Sequence[Sequence[str]]]
NOTHING_FIXED = Options()
#: Of a product's seconds otherwise, what one task that also copies may take: nothing runs beside
#: the copies then. Arbitrary.
IN_ONE = 0.9


@dataclass(frozen=True)
class Operands:
    """A and B as they are stored, lazy transposes taken off, and what a task does to them.

    Parameters
    ----------
    a, b : array or MatrixSpec
    step : Step
        `trans_a` and `trans_b` say what op() is.
    gram : bool
        op(B) is the transpose of op(A): one array, transposed on one side.
    """

    a: Array | MatrixSpec
    b: Array | MatrixSpec
    step: multiply.Step
    gram: bool

    @classmethod
    def of(cls, a: Array | MatrixSpec, b: Array | MatrixSpec, step: multiply.Step) -> Operands:
        """Peel transposes off Dask arrays, and see whether both are the same array."""
        (a, flip_a), (b, flip_b) = _peeled(a), _peeled(b)
        if flip_a or flip_b:
            step = replace(step, trans_a=step.trans_a != flip_a, trans_b=step.trans_b != flip_b)
        return cls(a, b, step, gram=_same(a, b) and step.trans_a != step.trans_b)

    @property
    def arrays(self) -> list[Array]:
        """Those that are more than a spec."""
        return [x for x in (self.a, self.b) if not isinstance(x, MatrixSpec)]

    def hosted(self, c: Array | MatrixSpec | None, cluster: ClusterSpec) -> bool:
        """Whether blocks lie in the host memory of workers that multiply them on GPUs."""
        given = [x for x in (self.a, self.b, c) if x is not None]
        return (
            cluster.on_gpus
            and any(x.hosted if isinstance(x, MatrixSpec) else is_dask(x) for x in given)
            and not any(map(on_gpu, self.arrays))
            and all(on_devices(named_dtype(str(x.dtype))) for x in (*given, self.step))
        )

    def problem(
        self,
        c: Array | MatrixSpec | None,
        pack: str,
        cluster: ClusterSpec,
        held: Held,
        *,
        hosted: bool,
        chunks: tuple[Blocks, ...],
    ) -> Problem:
        """What is to be planned, for operands that may lie on workers of that cluster."""
        a, b = _spec(self.a, cluster, held), _spec(self.b, cluster, held)
        given = {"a": self.a, "b": self.b, "c": c}
        uploaded = [role for role, x in given.items() if hosted and x is not None and not _made(x)]
        return Problem(
            a=a.T if self.step.trans_a else a,
            b=b.T if self.step.trans_b else b,
            dtype=self.step.dtype,
            accumulate=self.step.accumulate,
            out_bytes=named_dtype(self.step.dtype).itemsize,
            sum_bytes=named_dtype(self.step.accumulate).itemsize,
            c=None if c is None else _spec(c, cluster, held),
            rereadable=(_rereadable(self.a), _rereadable(self.b)),
            pack=pack,
            gram=self.gram,
            awaited=any(is_dask(x) and not s.owners for x, s in ((self.a, a), (self.b, b))),
            uploaded=tuple(uploaded),
            downloaded=hosted,
            chunks=chunks,
        )


def product(
    a: Array,
    b: Array,
    c: Array | None,
    step: multiply.Step,
    options: Options,
    chunks: tuple[Blocks, ...] = (),
) -> Array:
    """alpha op(A) op(B) + beta C of checked operands: lazy if one is, else computed."""
    if not (is_dask(a) or is_dask(b) or is_dask(c)):
        return multiply.gemm(a, b, c=c, step=step)
    left = as_dask(a)
    operands = Operands.of(left, left if b is a else as_dask(b), step)
    a, b = operands.a, operands.b
    c = None if c is None else as_dask(c)
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    meta = np.empty_like(a._meta, shape=(0,) * (len(shape) + 2), dtype=step.dtype)
    made = planned(operands, options, None, c, chunks)
    if (client := current_client()) is not None:
        from multimm.graph.scheduler.install import install

        install(client)
    return build(made, a, b, c, operands.step, meta)


def as_multiplied(*given: Array | MatrixSpec | None) -> list[Any]:
    """A, B and C: those that are more than a spec as `product` would multiply them."""
    named = dict(zip("abc", given, strict=True))
    given_arrays = {n: x for n, x in named.items() if not isinstance(x, MatrixSpec | None)}
    made = dict(zip(given_arrays, arrays(**given_arrays), strict=True))
    if any(map(is_dask, made.values())):
        made = {name: as_dask(x) for name, x in made.items()}
    return list((named | made).values())


def planned(
    operands: Operands,
    options: Options,
    cluster: ClusterSpec | None,
    c: Array | MatrixSpec | None,
    chunks: tuple[Blocks, ...] = (),
) -> MatmulPlan:
    """The plan for some workers, by default those of the current client, or this process.

    `c` is what is added; None where it is not read. `chunks` are those that the result is to come
    in; empty: the plan's.
    """
    if cluster is not None and not isinstance(cluster, ClusterSpec):
        raise OptionError(
            f"cluster={cluster!r}: give a ClusterSpec, such as multimm.cluster.describe(client), "
            "multimm.cluster.local() or ClusterSpec.homogeneous(device, workers)"
        )
    gpu = any(map(on_gpu, operands.arrays))
    added = [] if c is None or isinstance(c, MatrixSpec) else [c]
    found, held = _workers(cluster, operands.arrays + added)
    on = found or local(gpu=gpu)
    # Of shapes alone nobody knows where they will lie: on the GPUs, if there are any.
    hosted = operands.hosted(c, on)
    pack = _pack_scheme(operands, on, gpu or hosted or not operands.arrays)
    problem = operands.problem(c, pack, on, held, hosted=hosted, chunks=chunks)
    plan = partial(plan_matmul, cluster=on, precision=operands.step.precision, options=options)
    made = [plan(problem)]
    if {*"ab"} <= {*problem.uploaded} and (made[0].bytes_spilled or on.workers == 1):
        # Operands in host memory need not be on a GPU all the time, nor in their own chunks.
        made.append(plan(replace(problem, rereadable=(True, True), from_host=True)))
    best = min(made, key=_rank)
    if options.given or not hosted:
        return best
    alone = in_one_task(problem, on, operands.step.precision)
    too_large, seconds = _rank(alone)
    return alone if (too_large, seconds / IN_ONE) < _rank(best) else best


def _rank(plan: MatmulPlan) -> tuple[bool, float]:
    """Whether it does not fit, and seconds: the least is the best."""
    return plan.peak_bytes > plan.budget_bytes, plan.seconds


def _peeled(x: Array | MatrixSpec) -> tuple[Array | MatrixSpec, bool]:
    return peel(x) if is_dask(x) else (x, False)  # type: ignore[arg-type]  # no spec is


def _same(a: Array | MatrixSpec, b: Array | MatrixSpec) -> bool:
    """One and the same array, or one spec given twice."""
    if isinstance(a, MatrixSpec) or isinstance(b, MatrixSpec):
        return a is b
    return is_dask(a) and is_dask(b) and bool(a.name == b.name)


def _spec(x: Array | MatrixSpec, cluster: ClusterSpec, held: Held) -> MatrixSpec:
    if isinstance(x, MatrixSpec):
        return x
    if not is_dask(x):
        return MatrixSpec(x.shape, str(x.dtype), x.dtype.itemsize)
    owners = _owners(x, cluster, held)
    dtype, stored = x.dtype, storage_of(x)
    return MatrixSpec(x.shape, str(dtype), dtype.itemsize, x.chunks, owners, storage=stored)


def _owners(x: Array, cluster: ClusterSpec, held: Held) -> tuple[int, ...]:
    """The workers of an operand's blocks: of a product that is still lazy, or of data in memory."""
    if owners := owners_of(x, cluster.workers):
        return cluster.ranks(owners)
    return where_blocks_lie(held.get(x.name, ()), cluster.addresses)


def _made(x: Array | MatrixSpec) -> bool:
    """Whether it is a product that is still lazy, made on the GPUs and then brought to the host."""
    return not isinstance(x, MatrixSpec) and is_dask(x) and below_download(x) is not x


def _rereadable(x: Array | MatrixSpec) -> bool:
    return is_dask(x) and reader_of(x) is not None


# Names of dtypes and the checks of a new value cost more than a small product on a GPU.
# Typed, because 2 and 2.0 are the same key and, to integers, different scalars.
@lru_cache(maxsize=1024, typed=True)
def step(
    dtype_a: np.dtype[Any],
    dtype_b: np.dtype[Any],
    dtype: np.dtype[Any],
    precision: str,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: Scalar = 1,
    beta: Scalar = 0,
) -> multiply.Step:
    """What each task does, for operands and a result of these dtypes."""
    accumulate = str(library_gemm.accumulate_dtype(dtype_a, dtype_b))
    return multiply.Step(accumulate, str(dtype), trans_a, trans_b, alpha, beta, precision)


def options(blocks: int | tuple[int, int] | None, slabs: int | None, p_k: int | None) -> Options:
    """What the caller fixed."""
    nothing_given = blocks is None and slabs is None and p_k is None
    return NOTHING_FIXED if nothing_given else Options(blocks, slabs, p_k)


def _pack_scheme(operands: Operands, cluster: ClusterSpec, gpu: bool) -> str:
    """The precision for which operand blocks are packed, empty where they never are."""
    step = operands.step
    dtypes = (operands.a.dtype, operands.b.dtype, step.dtype)
    narrow = step.accumulate == "float32" and all(map(is_narrow, dtypes))
    scheme = scheme_of(step.precision, operands.a.dtype, operands.b.dtype)
    able = gpu and all(scheme in device.packs for device in cluster.devices)
    return scheme if able and narrow else ""


def _workers(cluster: ClusterSpec | None, arrays: list[Array]) -> tuple[ClusterSpec | None, Held]:
    """The given workers, or those that a computation started now would run on; what they have."""
    client = current_client()
    on_paper = cluster is not None and not cluster.addresses
    if client is None or on_paper:
        return cluster, {}
    keys = {x.name: block_keys(x) for x in arrays if is_dask(x)}
    asked = list(dict.fromkeys(key for own in keys.values() for key in own))
    workers, holders = listed_with(client, asked)
    held = {name: [holders.get(key, ()) for key in own] for name, own in keys.items()}
    return cluster or described(client, workers), held
