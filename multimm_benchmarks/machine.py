"""What records say about the machine that measured."""

from __future__ import annotations

import os
import platform
from typing import Any

from multimm.cluster.inspect.host_report import gather


def described(gpus: int | None = None) -> dict[str, Any]:
    """Return what every record says of its machine; creates no CUDA context.

    Parameters
    ----------
    gpus : int, optional
        How many of the visible GPUs are used, the first ones; by default all.

    Returns
    -------
    dict
        "cuda" is the newest version that the driver runs. In records of kernels until 2026-11-22 it
        is that of CuPy's runtime, which has a key of its own since.
    """
    facts = gather()
    used = facts.gpus[:gpus]
    linked = len(used) > 1 and facts.nvlinks
    return {
        "gpu": used[0].name if used else None, "count": len(used), "driver": facts.driver,
        "cuda": ".".join(map(str, facts.cuda)) if facts.cuda else None,
        "links": f"{min(facts.nvlinks.values())} NVLinks per pair" if linked else None,
        "cpu": platform.machine(), "cores": os.cpu_count(),
    }  # fmt: skip
