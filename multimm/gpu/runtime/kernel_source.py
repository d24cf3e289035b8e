"""Kernel text: a file of kernels/, its includes and its parameters, in one string.

One string, because CuPy's disk cache knows a kernel by the text it is given: what a compiler
reads from an included file is no part of that key, and an edited header would quietly go on
meaning the old binary. This module reads files and knows nothing of CUDA or CuPy.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import PurePosixPath

from multimm.errors import KernelError, how_to_install

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
_PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\s*$")


def kernel_text(name: str, defines: Mapping[str, int]) -> str:
    """Return the complete text of a kernel file, ready for a compiler without include paths.

    Parameters
    ----------
    name : str
        A file of kernels/, such as ``"sgemm_ffma.cu"``.
    defines : mapping of str to int
        The kernel's compile-time parameters, written at the top as ``#define`` lines.

    Returns
    -------
    str
        Defines, then the file with each include in its place, once. ``#line`` directives keep
        the compiler's messages pointing at the files as they are on disk.

    Raises
    ------
    KernelError
        If a file does not exist.
    """
    return _assemble(name, tuple(defines.items()))


@functools.cache
def _assemble(name: str, defines: tuple[tuple[str, int], ...]) -> str:
    lines = [f"#define {key} {value}" for key, value in defines]
    _append(PurePosixPath(name), lines, set())
    return "\n".join(lines) + "\n"


def _append(path: PurePosixPath, lines: list[str], seen: set[PurePosixPath]) -> None:
    """Append a file and, in their places, the includes that no other file has brought in."""
    seen.add(path)
    lines.append(f'#line 1 "{path}"')
    for number, (line, include) in enumerate(_lines(path), start=1):
        if include is None:
            lines.append(line)
            continue
        target = PurePosixPath(include[1])
        if target not in seen:
            _append(target, lines, seen)
        lines.append(f'#line {number + 1} "{path}"')


@functools.cache
def _lines(path: PurePosixPath) -> list[tuple[str, re.Match[str] | None]]:
    """Lines of a file of kernels/, which many texts share, and whether they are includes."""
    return [
        ("" if _PRAGMA_ONCE.match(line) else line, _INCLUDE.match(line))
        for line in _read(path).splitlines()
    ]


def _read(path: PurePosixPath) -> str:
    """Read a file of kernels/; all paths, those of includes too, start there."""
    try:
        return resources.files("multimm.gpu").joinpath("cuda", *path.parts).read_text("utf-8")
    except FileNotFoundError:
        raise KernelError(
            f"kernel source {str(path)!r} was not found in multimm/gpu/cuda: the installation is "
            "incomplete, or the relative link to kernels/ was lost; install it again: "
            f"{how_to_install()}"
        ) from None
