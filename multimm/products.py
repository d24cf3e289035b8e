"""A product from the call to its plan or its result: what `matmul`, `gemm` and `plan` share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from multimm.cluster.describe import described
from multimm.cluster.inspect.cluster_spec import Holders, listed_with
from multimm.cluster.local import local
from multimm.errors import DTypeError, MemoryBudgetError, OptionError, ShapeError
from multimm.gpu.dtypes import (
    accumulate_dtype,
    check_requested,
    gemm_dtype,
    named,
    on_devices,
    requested,
    result_dtype,
    scalars_for,
    sums_for,
)
from multimm.gpu.integers.bounds import is_narrow
from multimm.gpu.integers.gemm import TENSOR_CORES, format_of
from multimm.gpu.integers.overflow import warn_of_overflow
from multimm.gpu.kernel_selection import DOUBLE, Precision, check_held
from multimm.gpu.problem import check_beta
from multimm.gpu.residues.formats import FORMATS
from multimm.graph.array import build
from multimm.graph.data_location import (
    block_keys,
    lie_in_process,
    makers_of,
    owners_of,
    source_keys,
    where_blocks_lie,
)
from multimm.graph.lazy_views import Peeled, peel
from multimm.graph.lowering.host_downloads import below_download
from multimm.graph.lowering.operand import reader_of, storage_of
from multimm.graph.made_again import maker_of, unsure
from multimm.graph.same_values import same_values
from multimm.graph.shared_reads import reads_of
from multimm.graph.tasks import multiply
from multimm.operands import (
    Array,
    arrays,
    as_dask,
    check_same_device,
    current_client,
    is_dask,
    on_gpu,
)
from multimm.planning.choice import in_one_task, plan_matmul
from multimm.planning.hardware import ClusterSpec
from multimm.planning.matrix import MatrixSpec
from multimm.planning.options import Options
from multimm.planning.plan import MatmulPlan
from multimm.planning.problem import BY_RESIDUES, Problem
from multimm.planning.tiling.counts import bounds_blocks
from multimm.planning.tiling.grid import Blocks
from multimm.result_chunks import asked_for
from multimm.shapes import broadcast, check_operands, check_result

Scalar = complex
NOTHING_FIXED = Options()  #: to make one takes as long as to check a small product
Given = Any  #: an operand: an array, or a `MatrixSpec`
#: Of a product's seconds otherwise, what one task that also copies may take: nothing runs beside
#: the copies then. Arbitrary.
IN_ONE = 0.9


class Answer(NamedTuple):
    """What the scheduler has said: see `ask`."""

    cluster: ClusterSpec | None
    holders: Holders


class Located(NamedTuple):
    """An operand without its values."""

    spec: MatrixSpec
    awaited: bool  #: its blocks are still to be made, though it may be known where
    made_in_place: bool  #: they are still to be made, by workers that are known


class Product(NamedTuple):
    """alpha op(A) op(B) + beta C of operands that fit together: see `checked`."""

    a: Given  #: as stored: lazy transposes and conjugates are in `step`; of a vector a matrix
    b: Given
    c: Given  #: None where it is not read
    step: multiply.Step
    options: Options
    chunks: tuple[Blocks, ...]  #: that the result is to come in; empty: those of the plan
    vectors: tuple[bool, bool]  #: A is a vector, B is one: the result has a dimension less
    asked: bool  #: the dtype of the result was asked for

    @property
    def gram(self) -> bool:
        """op(B) is the transpose of op(A), conjugated or not: one array, transposed on one side.

        C is then symmetric or Hermitian until C is added; unless alpha leaves it neither.
        """
        kept = not self.step.hermitian or self.step.alpha.imag == 0
        return kept and self._same == "turned"

    @property
    def _same(self) -> str:
        """Whether A and B are one array: ``"plain"``, or ``"turned"`` on one side."""
        a, b = self.a, self.b
        if not (a.name == b.name if is_dask(a) and is_dask(b) else a is b):
            return ""
        return "turned" if self.step.trans_a != self.step.trans_b else "plain"

    @property
    def _k(self) -> int:
        return int(self.a.shape[-2 if self.step.trans_a else -1])

    @property
    def _arrays(self) -> list[Array]:
        return _arrays(self.a, self.b)

    def result(self, answer: Answer | None = None) -> Array:
        """Lazy if one operand is, else computed; planned for what the scheduler said, if it did."""
        warn_of_overflow(self.a.dtype, self.b.dtype, self._k, self.step.dtype, self.asked)
        if is_dask(self.a):
            made = self._lazy(answer)
        else:
            made = multiply.gemm(self.a, self.b, c=self.c, step=self.step)
        # Note: an index makes a scalar of a (1, 1) chunk, where Dask's product has an array.
        if self.vectors[0]:
            made = made.squeeze(-2)
        if self.vectors[1]:
            made = made.squeeze(-1)
        # Of two vectors NumPy makes a scalar, CuPy and Dask an array of 0 dimensions.
        return made if made.ndim else made[()]

    def _lazy(self, answer: Answer | None) -> Array:
        shape = broadcast(self.a.shape[:-2], self.b.shape[:-2])
        meta = np.empty_like(self.a._meta, shape=(0,) * (len(shape) + 2), dtype=self.step.dtype)
        plan = self.plan(answer=answer)
        if (client := current_client()) is not None:
            from multimm.graph.scheduler.install import install

            install(client)
        return build(plan, self.a, self.b, self.c, self.step, meta)

    def plan(self, cluster: ClusterSpec | None = None, answer: Answer | None = None) -> MatmulPlan:
        """The plan for some workers, by default those of the current client, or this process."""
        if cluster is not None and not isinstance(cluster, ClusterSpec):
            raise OptionError(
                f"cluster={cluster!r}: give a ClusterSpec, such as multimm.cluster.describe(client)"
                ", multimm.cluster.local() or ClusterSpec.homogeneous(device, workers)"
            )
        gpu = any(map(on_gpu, self._arrays))
        found, holders = answer or ask(cluster, _arrays(self.a, self.b, self.c))
        on = found or local(gpu=gpu)
        # Of shapes alone nobody knows where they will lie: on the GPUs, if there are any.
        hosted = self._hosted(on)
        on_gpus = gpu or hosted or not self._arrays
        int8 = self._int8(on, on_gpus)
        pack = self._pack_scheme(on, on_gpus, int8)
        units = {"pack": pack, "int8": int8, "exact": self._exact(on, on_gpus)}
        problem = self._problem(on, holders, hosted=hosted, **units)
        plan = partial(plan_matmul, cluster=on, precision=self.step.precision, options=self.options)
        made = [plan(problem)]
        if {*"ab"} <= {*problem.uploaded} and (made[0].bytes_spilled or on.workers == 1):
            # Operands in host memory need not be on a GPU all the time, nor in their own chunks.
            made.append(plan(replace(problem, rereadable=(True, True), from_host=True)))
        best = min(made, key=_rank)
        if again := self._made_again(problem, best):
            # Nobody knows how long it takes to make a chunk. Most are made once all the same.
            with suppress(MemoryBudgetError):  # of chunks that no worker can make beside others
                best = min(plan(again), best, key=_beyond)
        if self.options.given or not hosted:
            return best
        alone = in_one_task(problem, on, self.step.precision)
        too_large, seconds = _rank(alone)
        return alone if (too_large, seconds / IN_ONE) < _rank(best) else best

    def _made_again(self, problem: Problem, plan: MatmulPlan) -> Problem | None:
        """The same of operands that are made when they are needed, if `plan` spills them."""
        # Dask makes most operands when their products are due, but not where all need one task.
        perhaps = plan.layout.in_step and problem.a.nbytes + problem.b.nbytes > plan.budget_bytes
        if not (_beyond(plan) or perhaps) or not problem.awaited or plan.cluster.on_gpus:
            return None
        specs, rereadable = [], []
        given = (self.a, self.step.trans_a, problem.a), (self.b, self.step.trans_b, problem.b)
        for x, turned, spec in given:
            if isinstance(x, MatrixSpec) or spec.owners:
                return None
            maker = None if _rereadable(x) else maker_of(x)
            if maker is not None and (stored := maker.storage):
                spec = replace(spec, storage=stored.T if turned else stored)
            specs.append(spec)
            rereadable.append(maker is not None or _rereadable(x))
        enough = any if plan.layout.alone else all  # of what else is made workers keep all
        if not enough(rereadable):
            return None
        if unsure(self.a) & unsure(self.b):  # what both are made of is to be the same in both
            return None
        return replace(problem, a=specs[0], b=specs[1], rereadable=(rereadable[0], rereadable[1]))

    def _hosted(self, cluster: ClusterSpec) -> bool:
        """Whether blocks lie in the host memory of workers that multiply them on GPUs."""
        given = [x for x in (self.a, self.b, self.c) if x is not None]
        return (
            cluster.on_gpus
            and any(x.hosted if isinstance(x, MatrixSpec) else is_dask(x) for x in given)
            and not any(map(on_gpu, self._arrays))
            and all(on_devices(named(str(x.dtype))) for x in (*given, self.step))
        )

    def _pack_scheme(self, cluster: ClusterSpec, gpu: bool, int8: bool) -> str:
        """The precision for which operand blocks are packed, empty where they never are."""
        step = self.step
        dtypes = (self.a.dtype, self.b.dtype, step.dtype)
        narrow = step.accumulate == "float32" and all(map(multiply.becomes_float32, dtypes))
        # The real numbers in them.
        narrow |= step.accumulate == "complex64" and "complex64" in map(str, dtypes[:2])
        scheme: str = multiply.scheme_of(step.precision, self.a.dtype, self.b.dtype)
        if int8 and str(self.a.dtype) in DOUBLE:
            return BY_RESIDUES
        able = gpu and all(scheme in device.packs for device in cluster.devices)
        return scheme if able and narrow else ""

    def _int8(self, cluster: ClusterSpec, gpu: bool) -> bool:
        """Whether INT8 tensor cores multiply its operands: bytes, or others by residues."""
        if not (gpu and all(BY_RESIDUES in device.packs for device in cluster.devices)):
            return False
        step, dtypes = self.step, {_dtype(self.a), _dtype(self.b)}
        if all(map(is_narrow, dtypes)):
            return True
        alike = {*map(str, dtypes), step.dtype} == {step.accumulate}
        known = FORMATS.get(step.accumulate)
        return alike and known is not None and known.keeps(step.precision)

    def _exact(self, cluster: ClusterSpec, gpu: bool) -> str:
        """The format that integers are multiplied in (`format_of`), empty for other operands."""
        able = gpu and all(TENSOR_CORES in device.packs for device in cluster.devices)
        return format_of(_dtype(self.a), _dtype(self.b), self._k, named(self.step.accumulate), able)

    def _problem(
        self, cluster: ClusterSpec, holders: Holders, *, hosted: bool, **units: Any
    ) -> Problem:
        found = [self._located(x, cluster, holders) for x in (self.a, self.b)]
        a, b = (x.spec for x in found)
        given = {"a": self.a, "b": self.b, "c": self.c}
        uploaded = [role for role, x in given.items() if hosted and x is not None and not _made(x)]
        return Problem(
            a=a.T if self.step.trans_a else a,
            b=b.T if self.step.trans_b else b,
            dtype=self.step.dtype,
            accumulate=self.step.accumulate,
            c=None if self.c is None else self._located(self.c, cluster, holders).spec,
            rereadable=(_rereadable(self.a), _rereadable(self.b)),
            **units,
            symmetric=self.gram,
            same=self._same,
            awaited=any(x.awaited for x in found),
            made_in_place=(found[0].made_in_place, found[1].made_in_place),
            held=(cluster.alone and _held(self.a), cluster.alone and _held(self.b)),
            uploaded=tuple(uploaded),
            downloaded=hosted,
            chunks=self.chunks,
        )

    def _located(self, x: Given, cluster: ClusterSpec, holders: Holders) -> Located:
        """An operand, and where its blocks lie or will be made."""
        if isinstance(x, MatrixSpec):
            return Located(x, awaited=False, made_in_place=False)
        if not is_dask(x):
            spec = MatrixSpec(x.shape, str(x.dtype), x.dtype.itemsize)
            return Located(spec, awaited=False, made_in_place=False)
        awaited = False
        # Of a product that is still lazy. Without workers it lies nowhere: it is made, as others.
        addresses = () if bounds_blocks(cluster) else owners_of(x, cluster.workers)
        if addresses:
            owners = cluster.ranks(addresses)
        else:
            held = [holders.get(key, ()) for key in source_keys(x)]
            owners = where_blocks_lie(held, cluster.addresses)
            awaited = not (owners and block_keys(x))
        if not owners and cluster.workers > 1 and not _rereadable(x):
            beside = filter(is_dask, self._arrays)
            owners = cluster.ranks(makers_of(x, beside, cluster.workers))
        dtype, stored = x.dtype, storage_of(x)
        spec = MatrixSpec(x.shape, str(dtype), dtype.itemsize, x.chunks, owners, storage=stored)
        product = bool(addresses) and not cluster.on_gpus  # no chunk of which lies anywhere yet
        return Located(spec, awaited, bool(owners) and (awaited or product))


def options(blocks: int | tuple[int, int] | None, slabs: int | None, p_k: int | None) -> Options:
    """What the caller fixed."""
    if blocks is slabs is p_k is None:
        return NOTHING_FIXED
    return Options(blocks, slabs, p_k)


def checked(
    a: Given,
    b: Given,
    c: Given = None,
    *,
    alpha: Scalar = 1,
    beta: Scalar = 0,
    trans_a: bool = False,
    trans_b: bool = False,
    stacks: bool,
    precision: Precision,
    options: Options,
    chunks: Any,
    dtype: Any = None,
) -> Product:
    """What `matmul` (with vectors and `stacks`), `gemm` and `plan` were asked for, or an error."""
    check_beta(beta, c)
    given = {"a": a, "b": b} | ({} if c is None else {"c": c})
    made = arrays(**{name: x for name, x in given.items() if not isinstance(x, MatrixSpec)})
    a, b, c = _cut_as(made.get("a", a), a), _cut_as(made.get("b", b), b), made.get("c", c)
    _check_shapes(a, b, c, trans_a, trans_b, stacks=stacks)
    lazy = any(map(is_dask, made.values()))
    if lazy or len({*map(type, made.values())}) > 1:
        check_same_device(**made)
    sums, out, alpha, beta = _dtypes(a, b, c, alpha, beta, trans_a, dtype)
    # Of integers sums are exact where a dtype was asked for.
    check_held(precision, str(out), *([] if dtype is not None else [str(sums)]))
    wanted = asked_for(chunks, a, b, out, trans_a, trans_b)
    step = _step(sums, out, precision, trans_a, trans_b, alpha, beta)
    if lazy:
        same = a is b
        a, b, c = (as_dask(x) if n in made else x for n, x in zip("abc", (a, b, c), strict=True))
        b = a if same else b  # of a large array each call makes another name
    vectors = len(a.shape) == 1, len(b.shape) == 1
    a, b = a[None, :] if vectors[0] else a, b[:, None] if vectors[1] else b
    if lazy:
        a, b, step = _as_stored(a, b, step)
    added = c if beta != 0 else None
    return Product(a, b, added, step, options, wanted, vectors, dtype is not None)


def _check_shapes(
    a: Given, b: Given, c: Given, trans_a: bool, trans_b: bool, *, stacks: bool
) -> None:
    if not stacks and not len(a.shape) == len(b.shape) == 2:
        raise ShapeError(f"gemm takes matrices, got shapes {a.shape} and {b.shape}: use matmul")
    if not (a.shape and b.shape):
        raise ShapeError(
            f"matmul of shapes {a.shape} and {b.shape}: operands need at least 1 dimension; "
            "multiply by a scalar with *"
        )
    check_operands(a.shape, b.shape, trans_a, trans_b)
    if c is not None:
        rows, columns = a.shape[-1 if trans_a else -2], b.shape[-2 if trans_b else -1]
        check_result("c", c.shape, (rows, columns))


def _dtypes(
    a: Given, b: Given, c: Given, alpha: Scalar, beta: Scalar, trans_a: bool, dtype: Any
) -> tuple[np.dtype[Any], np.dtype[Any], Scalar, Scalar]:
    """Dtypes of sums and of the result, by default or for the `dtype` asked for; scalars in it."""
    dtypes, added = [_dtype(a), _dtype(b)], None if c is None else _dtype(c)
    if dtype is None:
        out = gemm_dtype(alpha, result_dtype(*dtypes), beta, added)
        return accumulate_dtype(*dtypes), out, alpha, beta
    out = requested(dtype)
    check_requested(*dtypes, alpha, beta, added, out)
    if not on_devices(out) and any(map(on_gpu, _arrays(a, b, c))):
        raise DTypeError(f"dtype={out}: GPUs have no such numbers; ask for float64, or complex128")
    sums = sums_for(*dtypes, a.shape[-2 if trans_a else -1], out)
    return sums, out, *scalars_for(alpha, beta, out)


def _as_stored(a: Given, b: Given, step: multiply.Step) -> tuple[Given, Given, multiply.Step]:
    """Operands without lazy transposes and conjugates, which the step then does; one array once."""
    (a, flip_a, conj_a), (b, flip_b, conj_b) = _peeled(a), _peeled(b)
    if flip_a or flip_b or conj_a or conj_b:
        trans_a, trans_b = step.trans_a != flip_a, step.trans_b != flip_b
        step = replace(step, trans_a=trans_a, trans_b=trans_b, conj_a=conj_a, conj_b=conj_b)
    if not (is_dask(a) and is_dask(b)):
        return a, b, step
    if a.name != b.name and same_values(a, b, turned=step.trans_a == step.trans_b):
        b, step = a, replace(step, trans_b=not step.trans_a)
    a_sums, b_sums = 1 - step.trans_a, int(step.trans_b)
    return reads_of(a, b, a_sums, b_sums), reads_of(b, a, b_sums, a_sums), step


def _cut_as(x: Given, given: Given) -> Given:
    """An operand in the chunks of a matrix that it was given in, also where some are empty.

    Only dimensions before these are broadcast, for which `arrays` joins empty chunks.
    """
    if not is_dask(given) or x.chunks[-2:] == given.chunks[-2:]:
        return x
    return x.rechunk((*x.chunks[:-2], *given.chunks[-2:]))


def _arrays(*given: Given) -> list[Array]:
    """What is there, and not on paper."""
    return [x for x in given if x is not None and not isinstance(x, MatrixSpec)]


def _dtype(x: Given) -> np.dtype[Any]:
    return named(x.dtype) if isinstance(x, MatrixSpec) else x.dtype


def _rank(plan: MatmulPlan) -> tuple[bool, float]:
    """Whether it does not fit, and seconds: the least is the best."""
    return plan.peak_bytes > plan.budget_bytes, plan.seconds


def _beyond(plan: MatmulPlan) -> float:
    """Bytes for which there is no memory."""
    return plan.bytes_spilled + max(0, plan.peak_bytes - plan.budget_bytes)


def _peeled(x: Given) -> Peeled:
    return peel(x) if is_dask(x) else Peeled(x, turned=False, conjugated=False)


def _made(x: Given) -> bool:
    """Whether it is a product that is still lazy, made on the GPUs and then brought to the host."""
    return is_dask(x) and below_download(x) is not x


def _held(x: Given) -> bool:
    return is_dask(x) and lie_in_process(x)


def _rereadable(x: Given) -> bool:
    return is_dask(x) and reader_of(x) is not None


# Names of dtypes and the checks of a new value cost more than a small product on a GPU.
# Typed, because 2 and 2.0 are the same key and, to integers, different scalars.
@lru_cache(maxsize=1024, typed=True)
def _step(
    sums: np.dtype[Any],
    dtype: np.dtype[Any],
    precision: Precision,
    trans_a: bool,
    trans_b: bool,
    alpha: Scalar,
    beta: Scalar,
) -> multiply.Step:
    """What each task does, for sums and a result of these dtypes."""
    return multiply.Step(str(sums), str(dtype), trans_a, trans_b, alpha, beta, precision)


def ask(cluster: ClusterSpec | None, arrays: Sequence[Array]) -> Answer:
    """The given workers, or those that a computation started now would run on; who has blocks."""
    client = current_client()
    on_paper = cluster is not None and not cluster.addresses
    if client is None or on_paper:
        return Answer(cluster, {})
    keys = dict.fromkeys(key for x in arrays if is_dask(x) for key in source_keys(x))
    workers, holders = listed_with(client, list(keys))
    return Answer(cluster or described(client, workers), holders)
