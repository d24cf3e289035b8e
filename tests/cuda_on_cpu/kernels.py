"""The call table: how each kernel is built and called on the CPU. Adding one is a line of `TABLE`.

Tiles are small, so that a few hundred elements meet every edge; a kernel's index arithmetic does
not depend on how large they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

from cuda_on_cpu import products
from cuda_on_cpu.broad import broad_cases
from cuda_on_cpu.complex_parts import mirror_cases, parts_cases
from cuda_on_cpu.elementwise import add_cases, copy_cases, transpose_cases
from cuda_on_cpu.integers import byte_pack_cases, integer_cases, integer_pack_cases
from cuda_on_cpu.packing import pack_cases, unpack_cases
from cuda_on_cpu.products import Case, Signature, Tile, rung, sliced
from cuda_on_cpu.program import Program, started
from cuda_on_cpu.residuals import residual_cases
from cuda_on_cpu.residues import join_cases, residue_pack_cases, row_cases
from cuda_on_cpu.split_products import split_cases
from multimm.gpu.residues.formats import FORMATS
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.simt.configs import REGISTRY, TileConfig, entry_named
from multimm.gpu.simt.thin import OUTER_COLS, ThinConfig, axpy_config, dot_config, outer_config

#: Kernels that are more than plain CUDA C++: tensor cores that read shared memory.
NOT_PLAIN = frozenset({"sgemm_split.cu", "byte_mma.cu"})


@dataclass(frozen=True)
class Variant:
    """A kernel file with its compile-time parameters, and its cases."""

    file: str
    defines: tuple[tuple[str, int], ...]
    make_cases: Callable[[], Iterable[Case]]
    arch: int = 900  #: __CUDA_ARCH__
    constants: tuple[tuple[str, int, int], ...] = ()  #: names, values in the text, and here

    def __str__(self) -> str:
        values = ",".join(str(value) for _, value in self.defines)
        return f"{self.file}[{values}]" + (f"@{self.arch}" if self.arch != 900 else "")

    @property
    def text(self) -> str:
        """What a GPU's compiler would get."""
        text = kernel_text(self.file, dict(self.defines))
        for name, before, here in self.constants:
            old = f"constexpr int {name} = {before};"
            assert text.count(old) == 1, f"{self.file} no longer has {old}"
            text = text.replace(old, f"constexpr int {name} = {here};")
        return text

    def program(self, *, races: bool = False) -> Future[Program]:
        """The built program, or its compilation."""
        return started(self.text, self.arch, races)

    @functools.cached_property
    def cases(self) -> list[Case]:
        """What is computed, and what must come out."""
        return list(self.make_cases())


def product(file: str, entry: str, signature: Signature, tile: Tile, *, full: bool = True,
            most: int = 9999, arch: int = 900, **defines: int) -> Variant:  # fmt: skip
    """A kernel that computes products; TRANS_A ... WIDE_B, where defined, say which ones.

    `most` bounds the cost of a case: large tiles meet every edge but not many of each.
    """

    def cases() -> Iterator[Case]:
        lower = defines.get("LOWER", 0)
        problems = products.problems(tile, full=full, slices=signature is sliced)
        for seed, problem in enumerate(products.squares(tile) if lower else problems):
            if problem.steps(tile) > most:
                continue
            turned = replace(problem, trans_a=bool(defines.get("TRANS_A")),
                             trans_b=bool(defines.get("TRANS_B")))  # fmt: skip
            wide = (bool(defines.get("WIDE_A")), bool(defines.get("WIDE_B")))
            yield products.product_case(entry, tile, signature, turned.with_whole_rows(*wide), seed)

    made = (
        (lambda: products.guarded(cases(), way=defines["REFUSED"]))
        if defines.get("GUARDED")
        else cases
    )
    return Variant(file, tuple(defines.items()), made, arch)


def ladder(name: str, tile: Tile, **defines: int) -> Variant:
    """A rung of the ladder."""
    entry = f"sgemm_{name.split('_', 1)[1]}"
    return product(f"ladder/{name}.cu", entry, rung, tile, full=False, **defines)


def ffma(way: str, config: TileConfig, *, wide: str = "", **more: int) -> Variant:
    """The production kernel; `way` as ``"nt"``, `wide` names operands that are copied as float4."""
    c = config
    return product(
        "sgemm_ffma.cu", "sgemm_ffma", sliced,
        Tile(c.block_m, c.block_n, c.block_k, c.threads, c.shared_bytes), **more,
        **c.defines(), TRANS_A=int(way[0] == "t"), TRANS_B=int(way[1] == "t"),
        WIDE_A=int("a" in wide), WIDE_B=int("b" in wide),
    )  # fmt: skip


def skinny(way: str, config: ThinConfig, *, turned: bool = False, wide: bool = False) -> Variant:
    """A kernel for few columns of D, with `turned` for few rows, or for a thin k."""
    few, sums = config.defines.get("COLS", 9999), config.defines.get("THIN", 9999)
    defines = {**config.defines, "TRANS_A": int(way[0] == "t"), "TRANS_B": int(way[1] == "t")}
    if config.kernel == "sgemm_outer":
        tile = Tile(config.span, OUTER_COLS, 3, config.threads)
    else:
        sides = (few, config.span) if turned else (config.span, few)
        tile = Tile(*sides, config.chunk, config.threads, config.shared_bytes)
        defines["TURNED"] = int(turned)
    if config.kernel == "sgemm_axpy":
        defines["WIDE"] = int(wide)

    def cases() -> Iterator[Case]:
        large = replace(tile, m=max(4, tile.m), n=max(4, tile.n))
        for seed, problem in enumerate(products.problems(large, full=True, slices=sums == 9999)):
            stored = replace(problem, trans_a=way[0] == "t", trans_b=way[1] == "t")
            stored = stored.with_whole_rows(wide and not turned, wide and turned)
            side = {"m": min(stored.m, few)} if turned else {"n": min(stored.n, few)}
            yield products.product_case(
                config.kernel, tile, sliced, replace(stored, k=min(stored.k, sums), **side), seed
            )

    return Variant(f"{config.kernel}.cu", tuple(defines.items()), cases)


def transpose(word_bytes: int, words: int = 1, *, vector: int = 1, slots: int = 32,
              threads: int = 256, **skew: int) -> Variant:  # fmt: skip
    """The transpose of elements of `words` words, moved in slots of `vector` elements."""
    file = "transpose_skewed.cu" if skew else "transpose.cu"
    defines = {"WORD_BYTES": word_bytes, "WORDS": words, "VECTOR": vector, "SLOTS": slots,
               "THREADS": threads, "BAND": 3, **skew}  # fmt: skip
    return Variant(file, tuple(defines.items()), lambda: transpose_cases(defines))


def add(capacity: int, vector: int, unroll: int, parts: int, **more: int) -> Variant:
    """The sum of partial products."""
    defines = {"CAPACITY": capacity, "VECTOR": vector, "UNROLL": unroll, "THREADS": 64, **more}

    def cases() -> Iterable[Case]:
        return (
            products.guarded(add_cases(defines, parts), way=more["REFUSED"])
            if more
            else add_cases(defines, parts)
        )

    return Variant("add_partials.cu", tuple(defines.items()), cases)


def copying(capacity: int, threads: int, unroll: int) -> Variant:
    """Pieces of arrays to other places."""
    defines = {"CAPACITY": capacity, "THREADS": threads, "UNROLL": unroll}
    return Variant("copy_pieces.cu", tuple(defines.items()), lambda: copy_cases(defines))


def complex_parts(threads: int, unroll: int) -> Variant:
    """Complex matrices as real ones, and back."""
    defines = {"THREADS": threads, "UNROLL": unroll}
    return Variant("complex_parts.cu", tuple(defines.items()), lambda: parts_cases(defines))


def complex_mirror(threads: int, tile: int) -> Variant:
    """A Hermitian or a symmetric matrix of its halves."""
    defines = {"THREADS": threads, "TILE": tile}
    return Variant("complex_mirror.cu", tuple(defines.items()), lambda: mirror_cases(defines))


def pack(parts: int, arch: int = 900) -> Variant:
    """The split of float32 operands into FP16 parts."""
    defines = {"PARTS": parts, "BLOCKS": 1, "HELD": 3, "CAP": 40}
    return Variant("split_pack.cu", tuple(defines.items()), lambda: pack_cases(defines), arch)


def broad_pack(parts: int, arch: int = 900) -> Variant:
    """Float32 operands as numbers of a wide range."""
    defines = {"PARTS": parts, "BLOCKS": 1, "CAP": products.CAP}
    return Variant("broad_pack.cu", tuple(defines.items()), lambda: broad_cases(parts), arch)


def unpack(parts: int) -> Variant:
    """FP16 parts as float32 again."""
    return Variant("split_unpack.cu", (("PARTS", parts),), lambda: unpack_cases({"PARTS": parts}))


def residuals(parts: int) -> Variant:
    """What the parts do not carry, added to a product."""
    defines = {"PARTS": parts, "CAP": 60}
    return Variant("split_residuals.cu", tuple(defines.items()), lambda: residual_cases(defines))


def split_mma(parts: int, tile_n: int, slots: int, **more: int) -> Variant:
    """The product of packed operands by tensor cores that read registers."""
    defines = {"PARTS": parts, "TILE_N": tile_n, "SLOTS": slots, "BAND": 8, "CAP": 9, **more}
    lives = ("FOLD", 32, 2), ("FLUSH", 128, 4), ("PROMOTE", 48, 3)  # of sums, in slabs: short ones
    return Variant(
        "sgemm_split_mma.cu", tuple(defines.items()), lambda: split_cases(defines), constants=lives
    )


def integers_mma(tile_n: int, slots: int, **more: int) -> Variant:
    """The product of packed integers by tensor cores that read registers."""
    defines = {"PARTS": 1, "TILE_N": tile_n, "SLOTS": slots, "BAND": 8, "CAP": 9, "INTEGER": 1}
    defines |= more
    return Variant("sgemm_split_mma.cu", tuple(defines.items()), lambda: integer_cases(defines))


def integer_pack(bytes_: int, signed: int) -> Variant:
    """Narrow integers as FP16 numbers."""
    defines = {"BYTES": bytes_, "SIGNED": signed}
    return Variant("integer_pack.cu", tuple(defines.items()), lambda: integer_pack_cases(defines))


def residues(name: str, dtype: str, **more: int) -> Variant:
    """What is around products of residues: rows, packing, and joining."""
    made = {"rows": row_cases, "pack": residue_pack_cases, "join": join_cases}[name]
    defines = (*more.items(), *FORMATS[dtype].defines)
    given = [bool(x) for x in more.values()]
    return Variant(f"residue_{name}.cu", defines, lambda: made(*given, dtype))


_WARP = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 8, "WARP_M": 32, "WARP_N": 32, "THREAD_M": 8,
         "THREAD_N": 4, "MIN_BLOCKS": 1}  # fmt: skip
_COLUMNS = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 8, "THREAD_M": 4}
_SQUARES = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 8, "THREAD_M": 8, "THREAD_N": 4,
            "MIN_BLOCKS": 1}  # fmt: skip

_FFMA = TileConfig(32, 64, 16, 4, 4, stages=3, group=1, order=0, min_blocks=1)
_FFMA_TALL = TileConfig(64, 32, 8, 4, 8, stages=3, group=1, order=0, min_blocks=1)

TABLE: tuple[Variant, ...] = (
    ffma("nn", _FFMA),
    ffma("nn", replace(_FFMA, stages=4), wide="b"),
    ffma("nn", replace(_FFMA, stages=2), arch=750),
    ffma("nt", replace(_FFMA_TALL, stages=2, group=2)),
    ffma("tn", replace(_FFMA, order=1)),
    ffma("tn", _FFMA_TALL, wide="ab"),
    ffma("tn", replace(_FFMA, stages=2), wide="ab", arch=750),
    skinny("nn", dot_config(4, 2, 4, 2, 2, 1)),
    skinny("nt", dot_config(1, 1, 2, 1, 3, 1)),
    skinny("nt", dot_config(2, 4, 2, 2, 2, 1), turned=True),
    skinny("tn", axpy_config(4, 8, 1, 4, 2, 1), wide=True),
    skinny("tt", axpy_config(1, 8, 2, 4, 3, 1)),
    skinny("nn", axpy_config(2, 32, 4, 2, 1, 1), turned=True, wide=True),
    skinny("tn", axpy_config(16, 16, 1, 2, 2, 1), turned=True),
    skinny("nn", outer_config(7, 16)),
    skinny("tt", outer_config(3, 16)),
    transpose(1),
    transpose(2, threads=512),
    transpose(4, 3),
    transpose(4, vector=4, slots=16, threads=64),
    transpose(2, vector=8, slots=8, threads=64),
    transpose(4, vector=2, slots=16, threads=64, SKEW=8),
    transpose(8, vector=1, slots=32, threads=128, SKEW=4),
    add(2, 4, 1, 1),
    add(8, 1, 2, 5),
    add(64, 4, 2, 50),
    add(64, 4, 1, 64),
    add(8, 2, 1, 8, GUARDED=products.CAP, REFUSED=1),
    add(2, 1, 1, 2, GUARDED=products.CAP, REFUSED=0),
    add(2, 1, 1, 2, GUARDED=products.CAP, REFUSED=2),
    copying(2, 64, 1),
    copying(5, 32, 3),
    copying(60, 32, 4),
    complex_parts(64, 1),
    complex_parts(32, 3),
    complex_mirror(256, 32),
    pack(2),
    pack(2, arch=750),
    unpack(1),
    unpack(2),
    residuals(2),
    split_mma(1, 256, 2),
    split_mma(2, 64, 3),
    integers_mma(64, 3, LOWER=1),
    broad_pack(3),
    integer_pack(1, 1),
    Variant("byte_pack.cu", (), byte_pack_cases),
    *(residues(name, "float64", ALONG_K=along) for name in ("rows", "pack") for along in (0, 1)),
    residues("pack", "complex128", ALONG_K=0),
    residues("pack", "complex64", ALONG_K=1),
    *(residues("join", dtype) for dtype in FORMATS),
    ladder("1_naive", Tile(16, 16, 8, 256), BLOCK=16),
    ladder("2_coalesced", Tile(16, 16, 8, 256), BLOCK=16),
    ladder("3_shared_tile", Tile(16, 16, 16, 256), BLOCK=16),
    ladder("4_register_tile_1d", Tile(32, 32, 8, 256), **_COLUMNS),
    ladder("5_register_tile_2d", Tile(64, 32, 8, 64), **_SQUARES),
    ladder("6_vectorized", Tile(64, 32, 8, 64), **_SQUARES),
    ladder("7_warp_tile", Tile(64, 64, 8, 128), **_WARP),
)  # fmt: skip

#: Threads of these share memory as those of one above do: races and barriers do not depend on other
#: words, signs or layouts. Results are looked at, and sanitizers watch.
ALIKE: tuple[Variant, ...] = (
    ffma("nt", replace(_FFMA, stages=2)),
    ffma("nn", replace(_FFMA, stages=2), GUARDED=products.CAP, REFUSED=1),
    ffma("nt", replace(_FFMA, stages=2), LOWER=1),
    ffma("tn", replace(_FFMA_TALL, stages=2), LOWER=1),
    ffma("tt", replace(_FFMA, stages=4), wide="a"),
    skinny("tt", dot_config(16, 4, 2, 1, 2, 1), turned=True),
    skinny("nt", outer_config(1, 8)),
    skinny("tn", outer_config(12, 24)),
    transpose(4),
    transpose(8),
    transpose(16),
    transpose(8, 2),
    transpose(1, vector=4, slots=32, threads=128),
    transpose(8, vector=2, slots=8, threads=32),
    transpose(1, vector=4, slots=32, threads=128, SKEW=32),
    transpose(2, vector=4, slots=16, threads=64, SKEW=16),
    transpose(8, vector=2, slots=8, threads=64, SKEW=4),
    complex_mirror(64, 16),
    pack(1),
    residuals(1),
    split_mma(2, 64, 2, LOWER=1),
    integers_mma(128, 2),
    broad_pack(1),
    integer_pack(1, 0),
    integer_pack(2, 1),
    residues("rows", "complex128", ALONG_K=1),
    residues("rows", "complex64", ALONG_K=0),
)

#: The production kernel as it ships: large tiles, each stored in another way. Those that are not
#: here have the tile of one that is, turned over, or of `TABLE`.
SHIPPED: tuple[Variant, ...] = tuple(
    ffma(way, entry_named(REGISTRY, name).config, wide=wide, most=16)
    for name, way, wide in (
        ("large", "nn", "b"), ("quick_turned", "tn", "ab"), ("wide", "tt", ""), ("thin", "nt", ""),
        ("tiny", "tn", "ab"), ("portable", "nn", ""),
    )
)  # fmt: skip
