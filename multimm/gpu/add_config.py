"""How add_partials.cu cuts its work."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from multimm.errors import KernelError

#: Parts that one launch adds; a power of two, so that longer sums keep the shape of the tree.
MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class AddConfig:
    """How add_partials.cu cuts its work.

    Parameters
    ----------
    element_bytes : int
        4 for float32, 8 for float64.
    parts : int
    vector : int, optional
        Elements that one instruction moves.
    unroll : int, optional
        Vectors of one thread.
    threads : int, optional
        Of a block.
    """

    element_bytes: int
    parts: int
    vector: int = 1
    unroll: int = 1
    threads: int = 256

    def __post_init__(self) -> None:
        for holds, sentence in (
            (self.element_bytes in (4, 8), "an element has 4 or 8 bytes"),
            (1 <= self.parts <= MAX_PARTS, f"one launch adds 1 to {MAX_PARTS} parts"),
            (
                self.vector in (1, 2, 4) and self.vector * self.element_bytes <= 16,
                "one instruction moves 1, 2 or 4 elements, at most 16 bytes",
            ),
            (self.unroll >= 1, "a thread has at least one vector"),
            (
                self.threads % 32 == 0 and 32 <= self.threads <= 1024,
                "a block has 32 to 1024 threads, whole warps",
            ),
        ):
            if not holds:
                raise KernelError(f"{self}: {sentence}")

    @property
    def span(self) -> int:
        """Neighbouring elements of a row that a block adds."""
        return self.threads * self.vector * self.unroll

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return {name.upper(): value for name, value in asdict(self).items()}


def config_for(element_bytes: int, parts: int, alignment: int) -> AddConfig:
    """Return the configuration for rows that all begin on an alignment in bytes, up to 16."""
    vector = max(1, alignment // element_bytes)
    # Single elements need more of them on their way; measured on an H200, as the rest.
    return AddConfig(element_bytes, parts, vector, unroll=1 if vector > 1 else 8)
