"""How add_partials.cu cuts its work."""

from __future__ import annotations

from dataclasses import dataclass

from multimm.gpu.config import check, defines

#: Parts that one launch adds; a power of two, so that longer sums keep the shape of the tree.
MAX_PARTS = 64
#: Kernels add up to so many parts: few of them, to be compiled before a product needs them. Those
#: of 2 to 8 take up to 1.4 x as long with one for 8 or 64, on an H200; 9 and more 1.06 x at most.
CAPACITIES = (2, 4, 8, MAX_PARTS)


@dataclass(frozen=True, slots=True)
class AddConfig:
    """How add_partials.cu cuts its work.

    Parameters
    ----------
    element_bytes : int
        4 for float32, 8 for float64.
    capacity : int
        Parts that it can add.
    vector : int, optional
        Elements that one instruction moves.
    unroll : int, optional
        Vectors of one thread.
    threads : int, optional
        Of a block.
    """

    element_bytes: int
    capacity: int
    vector: int = 1
    unroll: int = 1
    threads: int = 256

    def __post_init__(self) -> None:
        capacities = [2**i for i in range(MAX_PARTS.bit_length())]
        vectors = self.vector in (1, 2, 4) and self.vector * self.element_bytes <= 16
        warps = self.threads % 32 == 0 and 32 <= self.threads <= 1024
        check(self, [
            (self.element_bytes in (4, 8), "an element has 4 or 8 bytes"),
            (self.capacity in capacities,
             f"a kernel adds up to a power of two of parts, {MAX_PARTS} at most"),
            (vectors, "one instruction moves 1, 2 or 4 elements, at most 16 bytes"),
            (self.unroll >= 1, "a thread has at least one vector"),
            (warps, "a block has 32 to 1024 threads, whole warps"),
        ])  # fmt: skip

    @property
    def span(self) -> int:
        """Neighbouring elements of a row that a block adds."""
        return self.threads * self.vector * self.unroll

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return defines(self)


def config_for(element_bytes: int, parts: int, alignment: int) -> AddConfig:
    """Return the configuration for some parts, in rows that begin on an alignment in bytes."""
    vector = max(1, alignment // element_bytes)
    capacity = next(most for most in CAPACITIES if parts <= most)
    # Single elements need more of them on their way; measured on an H200, as the rest.
    return AddConfig(element_bytes, capacity, vector, unroll=1 if vector > 1 else 8)
