"""Products by a test's own plan, which `matmul` would not have chosen."""

from __future__ import annotations

import numpy as np

from multimm.graph.array import build
from multimm.graph.tasks.multiply import Step
from multimm.planning.spec import MatrixSpec

FLOAT = Step("float32", "float32")


def spec_of(x, *owners):
    """What a plan knows of a lazy array."""
    return MatrixSpec(x.shape, str(x.dtype), chunks=x.chunks, owners=owners)


def by_plan(plan, a, b, c=None, step=FLOAT):
    """The lazy product."""
    return build(plan, a, b, c, step, np.empty((0,) * max(a.ndim, b.ndim), step.dtype))
