"""What all configurations of kernels have in common: rules, and names in the kernel's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from multimm.errors import KernelError

#: Whether something holds, and the sentence that says what has to.
Rules = Sequence[tuple[bool, str]]


def check(config: Any, *rules: Rules) -> None:
    """Raise `KernelError` for the first rule that a configuration breaks."""
    for holds, sentence in (rule for each in rules for rule in each):
        if not holds:
            raise KernelError(f"{config}: {sentence}")


def defines(config: Any, *left_out: str) -> dict[str, int]:
    """The fields of a configuration, a dataclass, by the kernel's names of them."""
    given: dict[str, int] = asdict(config)
    return {name.upper(): value for name, value in given.items() if name not in left_out}
