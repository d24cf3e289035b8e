"""The products that are measured, by name."""

from __future__ import annotations

from dataclasses import dataclass

#: Compared in all four transposes.
SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
#: Those of them of which sustained rates are recorded too: they fill an H200.
SUSTAINED = (2048, 4096, 8192, 16384)
#: (op(A), op(B)) by the letters that BLAS gives them.
TRANSPOSES = {"NN": (False, False), "NT": (False, True), "TN": (True, False), "TT": (True, True)}


@dataclass(frozen=True, slots=True)
class Case:
    """A stack of `batch` products of op(A) m x k by op(B) k x n, and how the operands lie."""

    m: int
    n: int
    k: int
    transposes: str = "NN"
    batch: int = 0  #: 0 is a single product and no stack
    extra: int = 0  #: by how much leading dimensions exceed the width
    offset: int = 0  #: elements of 4 bytes between an aligned address and the first one

    @property
    def name(self) -> str:
        """Short, unique among the cases."""
        parts = [f"{self.m} x {self.n} x {self.k}", self.transposes]
        if self.batch:
            parts.append(f"{self.batch} times")
        if self.extra:
            parts.append(f"ld = width + {self.extra}")
        if self.offset:
            parts.append(f"base + {4 * self.offset} bytes")
        return ", ".join(parts)

    @property
    def trans_a(self) -> bool:
        """Whether A is stored k x m."""
        return TRANSPOSES[self.transposes][0]

    @property
    def trans_b(self) -> bool:
        """Whether B is stored n x k."""
        return TRANSPOSES[self.transposes][1]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of A, B and D as they lie in memory."""
        stack = (self.batch,) if self.batch else ()
        a = (self.k, self.m) if self.trans_a else (self.m, self.k)
        b = (self.n, self.k) if self.trans_b else (self.k, self.n)
        return (*stack, *a), (*stack, *b), (*stack, self.m, self.n)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the definition."""
        return 2 * self.m * self.n * self.k * max(1, self.batch)

    @property
    def moved(self) -> int:
        """Bytes that must be read or written: every element of A, B and D once."""
        sizes = self.m * self.k + self.k * self.n + self.m * self.n
        return 4 * sizes * max(1, self.batch)


def square(n: int, transposes: str = "NN") -> Case:
    """Return the product of two n x n matrices."""
    return Case(n, n, n, transposes)


#: Products that memory limits: vectors, and a few rows, columns or terms.
THIN: tuple[Case, ...] = (
    Case(32768, 1, 32768),
    Case(32768, 1, 32768, "TN"),
    Case(1, 32768, 32768),
    Case(1, 32768, 32768, "NT"),
    Case(8, 8192, 8192),
    Case(8192, 8, 8192),
    Case(4096, 4096, 1),
    Case(4096, 4096, 7),
)

_SIZES = (
    (1, 4096, 4096), (4096, 1, 4096), (8, 8192, 8192), (8192, 8, 8192), (4096, 4096, 1),
    (4096, 4096, 7), (8192, 8192, 32), (32, 32, 65536), (64, 64, 1048576), (128, 128, 262144),
    (257, 257, 257), (509, 521, 523), (1009, 1013, 1019), (2039, 2053, 2063), (4093, 4099, 4091),
    (10007, 9973, 1009), (16383, 127, 16385), (127, 16383, 4097), (65536, 64, 64),
    (64, 65536, 64), (100000, 256, 256), (256, 100000, 256), (3072, 768, 768),
    (768, 3072, 3072), (50257, 768, 768), (1797, 1797, 64), (20000, 300, 20000),
    (300, 20000, 300), (5000, 5000, 5000), (6144, 6144, 129), (2048, 2048, 16384),
    (16384, 2048, 2048), (33, 33, 33),
)  # fmt: skip

#: Sizes and layouts that fast paths are not made for.
AWKWARD: tuple[Case, ...] = (
    *(Case(m, n, k) for m, n, k in _SIZES),
    Case(1024, 1024, 1024, extra=1),
    Case(4096, 4096, 4096, extra=1),
    Case(4096, 4096, 4096, offset=1),
    Case(4096, 4096, 4096, "TT", extra=1),
    Case(32, 32, 32, batch=10000),
    Case(100, 100, 100, batch=1000),
    Case(1000, 1000, 1000, batch=64),
)
