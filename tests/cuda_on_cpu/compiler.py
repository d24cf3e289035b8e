"""The host compiler: what it is told, and the cache of what it has made."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
KEPT_SECONDS = 7 * 24 * 3600  # a program that nobody ran for so long is removed; arbitrary

# -ffp-contract=off: a * b + c is rounded twice unless the kernel asks for fma.
_COMMON = ("-std=c++17", "-g1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", f"-I{HERE}")
# What follows a null pointer, or one behind the end of an object, AddressSanitizer finds as well.
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize=null,object-size,pointer-overflow",
               "-fno-sanitize-recover=all")  # fmt: skip


@functools.cache
def compiler() -> str:
    """The host compiler; $CXX decides.

    Raises
    ------
    RuntimeError
        If there is none: the message says what to install.
    """
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError(
        f"no C++ compiler was found ({wanted or 'g++, clang++, c++'}): kernels are run on the CPU "
        "by the host compiler, with its address and undefined-behaviour sanitizers; install one, "
        "on Debian and Ubuntu: apt-get install g++"
    )


@functools.cache
def _identity() -> bytes:
    """What a program depends on besides its text and the compiler's arguments."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout
    return b"".join([version, *(path.read_bytes() for path in sorted(HERE.glob("*.h")))])


@functools.cache
def _extra_flags() -> tuple[str, ...]:
    """Flags that not every compiler has."""
    wanted = (
        "-ftrivial-auto-var-init=pattern",  # registers start as large numbers, not as zeros
        "-fsanitize-sections=cuda_shared",  # red zones between shared variables
    )
    check = [compiler(), "-Werror", "-fsanitize=address", "-fsyntax-only", "-xc++", os.devnull]
    return tuple(
        flag for flag in wanted
        if subprocess.run([*check, flag], capture_output=True).returncode == 0
    )  # fmt: skip


@functools.cache
def _linker() -> tuple[str, ...]:
    """A linker that takes a third of the time, if there is one."""
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


@functools.cache
def _cache() -> Path:
    """The folder of built programs."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    for base in (home, tempfile.gettempdir()):
        folder = Path(base) / "multimm" / "cuda_on_cpu"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        for old in folder.iterdir():
            with suppress(FileNotFoundError):  # of another process, which is through with it
                if time.time() - old.stat().st_mtime > KEPT_SECONDS:
                    old.unlink()
        return folder
    raise RuntimeError(f"neither {home} nor {tempfile.gettempdir()} can be written to")


def _compiled(source: str, suffix: str, arguments: Sequence[str]) -> Path:
    """The file that the compiler makes of a source text, from the cache or new."""
    parts = [_identity(), source.encode(), *(argument.encode() for argument in arguments)]
    target = _cache() / (hashlib.sha256(b"\0".join(parts)).hexdigest()[:32] + suffix)
    if target.exists():
        os.utime(target)
        return target
    with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
        text, made = Path(scratch, "kernel.cpp"), Path(scratch, "made")
        text.write_text(source)
        done = subprocess.run(
            [compiler(), *arguments, "-o", str(made), str(text)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(
                f"{compiler()} refuses the kernel text (if it lacks sanitizers, install g++ with "
                f"libasan and libubsan):\n{done.stderr[:6000]}"
            )
        os.replace(made, target)  # at once, so that another process never sees half a file
    return target


_once = threading.Lock()  # what all programs share is made once


@functools.cache
def _object(name: str) -> str:
    """A source of this folder, compiled. Its path holds a hash of its text."""
    source = (HERE / name).read_text("utf-8")
    return str(_compiled(source, ".o", (*_COMMON, "-O2", "-c")))


@functools.cache
def _with_header(*flags: str) -> tuple[str, ...]:
    """Flags, and in front of all text cuda_on_cpu.h, which takes longer to read than a kernel."""
    header = _compiled('#include "cuda_on_cpu.h"', ".h.gch", [*flags, "-xc++-header"])
    return *flags, "-include", str(header.with_suffix(""))


def build(host_text: str, arch: int, races: bool) -> Path:
    """Compile and link what `translate.host_text` returns.

    Parameters
    ----------
    host_text : str
    arch : int
        ``__CUDA_ARCH__``.
    races : bool
        Watch shared memory for races, in place of bounds and undefined behaviour.

    Returns
    -------
    Path
        The program.
    """
    names = ("block.cpp", "memory.cpp", "launches.cpp", "tensor_cores.cpp")
    with _once:
        runtime = [_object(name) for name in (*names, *["races.cpp"] * races)]
        sanitizers = ("-fsanitize=thread",) if races else (*_SANITIZERS, *_extra_flags())
        flags = _with_header(*_COMMON, "-Og", *sanitizers)
    host_text = f"#define __CUDA_ARCH__ {arch}\n{host_text}"
    if not races:
        return _compiled(host_text, "", [*flags, *_linker(), *runtime, "-xc++"])
    # Compiled with calls to ThreadSanitizer, linked without it: races.cpp answers them.
    kernel = _compiled(host_text, ".o", [*flags, "-c"])
    # Where the linker puts it, the code is found when it runs: addr2line can read its addresses.
    return _compiled("", "", ["-no-pie", *_linker(), str(kernel), *runtime, "-xc++"])
