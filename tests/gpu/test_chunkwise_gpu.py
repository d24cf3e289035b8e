"""Chunks of an operand multiplied where they lie, along k too, as the tasks of one worker do."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
from gpu_arrays import assert_exact, padded

from multimm.graph.tasks.multiply import Step
from multimm.graph.tasks.partial_products import Recipe, partial_product
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.tiling.grid import spans

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

#: Of rows, and of k: chunks large enough for tensor cores, some that are not, and odd ones.
ROWS, ALONG_K, COLUMNS = (1200, 513, 7), (1024, 300, 33), 130


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Whole numbers whose products and sums all precisions hold exactly."""
    return np.random.default_rng(seed).integers(-4, 5, shape)


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("precision", ["float32", "ieee", "tf32"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("scaled", [False, True])
def test_each_chunk_is_multiplied_once(turned, wide, precision, dtype, scaled):
    sums = "float64" if dtype == "float64" else "float32"
    inner = Step(sums, sums, "a" in turned, "b" in turned, precision=precision)
    step = Step(sums, sums, "a" in turned, "b" in turned, precision=precision, alpha=1 + scaled)
    x, w = values((sum(ROWS), sum(ALONG_K)), 1), values((sum(ALONG_K), COLUMNS), 2)
    expected = (1 + scaled) * (x.astype("f8") @ w)
    large, small = ("b", "a") if wide else ("a", "b")
    across = large in turned
    chunks = [
        padded((block.T if across != wide else block).astype(dtype), 3, 1)[0]
        for block in (x[slice(*i), slice(*k)] for i, k in product(spans(ROWS), spans(ALONG_K)))
    ]
    flat = (small in turned) == wide  # k runs along the rows of what is stored
    cuts = [(slice(*k), slice(0, COLUMNS)) for k in spans(ALONG_K)]
    cuts = cuts if flat else [cut[::-1] for cut in cuts]
    w = np.ascontiguousarray((w if flat else w.T).astype(dtype))
    k_tiles = tuple(
        SubBlocks([0], ((cut, tuple(slice(0, x.stop - x.start) for x in cut)),), (w.shape,),
              tuple(x.stop - x.start for x in cut))
        for cut in cuts
    )  # fmt: skip
    groups = tuple(((height,), tuple(range(len(ALONG_K)))) for height in ROWS)
    recipe = Recipe(k_tiles, ALONG_K, groups, wide, wide != across)
    result = partial_product([cupy.asarray(w)], chunks, recipe=recipe, step=step, inner=inner)
    expected = expected.T if wide else expected
    assert_exact(result, expected.astype(sums), (turned, wide, precision, dtype, scaled))
