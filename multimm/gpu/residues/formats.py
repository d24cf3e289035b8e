"""Dtypes that are multiplied by residues: by which moduli, what they promise, when they pay."""

from __future__ import annotations

from typing import NamedTuple

from multimm.gpu.residues.moduli import COMPLEX, REAL, System


class Format(NamedTuple):
    """How products of a dtype run."""

    system: System
    single: bool  #: parts are float32
    #: Moduli with which products of normal or uniform numbers err less than cuBLAS's, and most of
    #: them: more only where the proof fails.
    usual: int
    most: int
    unit: float  #: u of the bound
    #: In multiplications, each of which gains a little time: what a product takes besides, what an
    #: element of A or B takes to pack, and one of C to join.
    start: float
    packed: float
    joined: float

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """Compile-time parameters of kernels that read or write its numbers."""
        return (("PARTS", self.system.parts), ("SINGLE", int(self.single)))

    def pays(self, m: int, n: int, k: int) -> bool:
        """Whether residues are the fastest way to a product on an H200."""
        return m * n * k >= self.start + self.packed * (m + n) * k + self.joined * m * n

    def keeps(self, precision: str) -> bool:
        """Whether they keep what was asked for, and no faster way does."""
        return precision == "float32" or (precision != "ieee" and not self.single)


#: By the dtype of all three matrices. Measured on H200s: docs/decisions/residues.md.
FORMATS = {
    "float64": Format(REAL, False, 14, 16, 2.0**-53, 1.3e10, 700, 1000),
    "complex128": Format(COMPLEX, False, 15, 16, 2.0**-53, 3e9, 200, 300),
    "complex64": Format(COMPLEX, True, 7, 8, 2.0**-24, 1.3e10, 500, 800),
}
