"""From kernel text to machine code: the one way in which this project compiles CUDA C++.

At run time and in tests without a GPU alike. Needs neither a GPU nor
CuPy. Unlike CuPy's own path from text, which always adds -ftz=true, this one keeps subnormals.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from multimm.errors import KernelError
from multimm.gpu.runtime import file_cache, nvrtc

logger = logging.getLogger(__name__)

#: What every kernel is compiled with, besides its target. IEEE arithmetic throughout: subnormals
#: are kept, divisions and roots are rounded correctly, a * b + c may become one rounding.
OPTIONS = (
    "--std=c++17",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--fmad=true",
    "--ptxas-options=-v",
)
LINE_INFO = "--generate-line-info"  #: for profilers; the code stays the same

#: Lines of the compiler's log that an error repeats.
_SHOWN = 3
#: Enters the name of each file, so that what it means may change.
_FORMAT = "1"


class Usage(NamedTuple):
    """What one kernel needs of a multiprocessor, in the compiler's words."""

    registers: int  #: per thread
    spilled: int  #: bytes that spill stores and loads move, together
    shared: int  #: bytes of static shared memory; newer chips add 1024 for the driver


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code, or PTX, for one target."""

    target: str
    binary: bytes
    log: str

    @property
    def usage(self) -> dict[str, Usage]:
        """By kernel name; empty for PTX, which has no registers yet."""
        reports = re.split(r"Compiling entry function '(\w+)' for", self.log)[1:]
        return {
            entry: Usage(
                _number(r"Used (\d+) registers", report),
                _number(r"(\d+) bytes spill stores", report)
                + _number(r"(\d+) bytes spill loads", report),
                _number(r"(\d+) bytes smem", report),
            )
            for entry, report in zip(reports[::2], reports[1::2], strict=True)
        }


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    return int(found[1]) if found else 0


def target_for(capability: int, *, specific: bool = False) -> str:
    """Return what to compile for, so that the result runs on a GPU.

    Parameters
    ----------
    capability : int
        Compute capability, 90 for sm_90.
    specific : bool
        For kernels that use instructions of one chip alone, such as wgmma of sm_90a.

    Returns
    -------
    str
        ``"sm_90"`` or ``"sm_90a"``; for a GPU newer than the compiler its nearest older
        relative, or PTX (``"compute_90"``) that the driver translates.

    Raises
    ------
    KernelError
        If the compiler is too old or too new for the GPU.
    """
    known = nvrtc.find().architectures()
    if capability in known:
        return f"sm_{capability}{'a' * specific}"
    older = [one for one in known if one < capability]
    if specific or not older:
        raise KernelError(
            f"NVRTC {_version()} compiles for compute capabilities {', '.join(map(str, known))}: "
            f"{capability} needs another one; use a GPU between them, or install another CUDA "
            "toolkit"
        )
    # Machine code runs on later chips of its generation, PTX on all later ones.
    kind = "sm" if older[-1] // 10 == capability // 10 else "compute"
    return f"{kind}_{older[-1]}"


def compile_text(text: str, target: str, options: Sequence[str] = ()) -> Compiled:
    """Compile complete kernel text, as `kernel_source.kernel_text` returns it.

    Parameters
    ----------
    text : str
    target : str
        Of `target_for`, such as ``"sm_90"``.
    options : sequence of str, optional
        Added to `OPTIONS`; of contradicting ones the later wins.

    Returns
    -------
    Compiled

    Raises
    ------
    KernelError
        What the compiler refuses, with its first messages; they name our files.
    """
    chosen = (f"--gpu-architecture={target}", *OPTIONS, *options)
    try:
        binary, log = nvrtc.find().compile(text, chosen, ptx=target.startswith("compute_"))
    except nvrtc.CompilationError as error:
        raise KernelError(f"NVRTC {_version()}, {target}: {_messages(str(error))}") from None
    return Compiled(target, binary, log)


def _messages(log: str) -> str:
    """The first errors of a log, or its first lines where none is marked as an error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b[^:]*:", line)] or lines
    more = len(errors) - _SHOWN
    return "\n".join(errors[:_SHOWN]) + (f"\n... and {more} more" if more > 0 else "")


def _version() -> str:
    return "{}.{}".format(*nvrtc.find().version())


@contextmanager
def compiled_file(text: str, target: str, name: str, options: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a file with the machine code of a text, compiled now or at an earlier time.

    Kept in `file_cache.directory()` under a hash of the text, the options and the compiler, and a
    hash of the content: a damaged file is compiled again. Where nothing can be kept, or what is
    kept is not this user's alone, the file exists as long as the context.

    Parameters
    ----------
    text, target, options
        As for `compile_text`.
    name : str
        Begins the file's name, for people who look into the directory.
    """
    home, stem = file_cache.directory(), stem_of(text, target, name, options)
    kept = None if home is None else _kept(home / "kernels", stem)
    if kept is not None:
        yield kept
        return
    compiled = compile_text(text, target, options)
    logger.info("compiled %s for %s: %s", name, target, compiled.usage or "PTX")
    if home is not None:
        kept = home / "kernels" / _file_name(stem, compiled.binary)
        if file_cache.write(kept, compiled.binary):
            yield kept
            return
    with tempfile.TemporaryDirectory(prefix="multimm-") as folder:
        path = Path(folder, _file_name(stem, compiled.binary))
        path.write_bytes(compiled.binary)
        yield path


def kept_stems() -> set[str]:
    """What names of files of earlier times begin with; their contents are not looked at."""
    home = file_cache.directory()
    kept = [] if home is None else file_cache.names(home / "kernels")
    return {name.rpartition("-")[0] for name in kept if name.endswith(".cubin")}


def stem_of(text: str, target: str, name: str, options: Sequence[str]) -> str:
    """What the name of the file begins with that `compiled_file` keeps."""
    return f"{name}-{target}-{_key(text, target, options)}"


def _key(text: str, target: str, options: Sequence[str]) -> str:
    parts = (_FORMAT, _version(), target, *OPTIONS, *options, text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _file_name(stem: str, binary: bytes) -> str:
    return f"{stem}-{hashlib.sha256(binary).hexdigest()[:16]}.cubin"


def _kept(folder: Path, stem: str) -> Path | None:
    for name in file_cache.names(folder):
        if not name.startswith(f"{stem}-") or not name.endswith(".cubin"):
            continue
        content = file_cache.read(folder / name)
        if content and name == _file_name(stem, content):
            return folder / name
        logger.warning("%s is damaged: the kernel is compiled again", folder / name)
    return None
