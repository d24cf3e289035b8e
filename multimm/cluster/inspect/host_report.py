"""What is installed and plugged in on this host, and what of it does not fit together.

Gathering and judging are apart: `gather` only looks, `findings` only thinks.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from typing import Any, Literal

from multimm.cluster.inspect.devices import (
    Gpu,
    driver_cuda,
    install_command,
    nvml,
    nvml_handle,
    visible_gpus,
)
from multimm.errors import DISTRIBUTION, how_to_install, printable

#: Distributions by the name of what they provide; CUDA 12 and 13 have builds of their own.
PACKAGES = {
    "multimm": (DISTRIBUTION,),
    "numpy": ("numpy",),
    "dask": ("dask",),
    "distributed": ("distributed",),
    "cupy": ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "dask-cuda": ("dask-cuda",),
    "rapids-dask-dependency": ("rapids-dask-dependency",),
    "rmm": ("rmm-cu12", "rmm-cu13", "rmm"),
    "ucxx": ("ucxx-cu12", "ucxx-cu13", "ucxx"),
    "distributed-ucxx": ("distributed-ucxx-cu12", "distributed-ucxx-cu13", "distributed-ucxx"),
    "numba-cuda": ("numba-cuda",),
    "zarr": ("zarr",),
    "h5py": ("h5py",),
}
#: What GPU workers cannot do without.
GPU_PACKAGES = ("cupy", "dask-cuda", "rmm", "numba-cuda")
#: What `doctor` says of the default.
SHARED_HOST = (
    "start() listens on the loopback interface, unencrypted: every user of this host can connect "
    "to the scheduler, and run code as you. On a host that others log in to, use "
    "start(security=distributed.Security.temporary())."
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found."""

    python: str
    system: str
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]  #: those that ``CUDA_VISIBLE_DEVICES`` leaves visible
    driver: str | None
    cuda: tuple[int, int] | None  #: newest version that the driver runs
    #: Active connections by pair of `gpus`. A switch joins all: each GPU's own number of links
    #: then stands for its pairs.
    nvlinks: Mapping[tuple[int, int], int]
    packages: Mapping[str, tuple[tuple[str, str], ...]]  #: distributions and their versions
    #: What these ask of each other and do not get: in a sentence, and as they write it.
    unmet: tuple[tuple[str, str], ...] = ()
    #: What else is installed under the import name `multimm`, each in a sentence.
    same_name: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth saying: a problem makes something fail, a note does not."""

    level: Literal["problem", "note"]
    text: str
    remedy: str = ""


def gather() -> Facts:
    """Look at this host; creates no CUDA context and imports no GPU package."""
    from dask.system import CPU_COUNT
    from distributed.system import memory_limit

    gpus = visible_gpus()
    with nvml() as module:
        driver = None if module is None else str(module.nvmlSystemGetDriverVersion())
        links = {} if module is None else _nvlinks(module, gpus)
    packages = {name: _installed(names) for name, names in PACKAGES.items()}
    return Facts(
        platform.python_version(),
        f"{platform.system()} {platform.release()} {platform.machine()}",
        int(CPU_COUNT),
        memory_limit(),
        gpus,
        driver,
        driver_cuda(),
        links,
        packages,
        tuple(_asked_in_vain(dict(itertools.chain(*packages.values())))),
        tuple(_of_our_name()),
    )


def _installed(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = []
    for name in names:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)


def _of_our_name() -> Iterator[str]:
    """Other distributions with files in a package `multimm`: pip lets all write to one folder.

    The `multimm` of the public package index, a modeller of chromatin, is one.
    """
    for name in dict.fromkeys(packages_distributions().get("multimm", ())):
        if name != DISTRIBUTION:
            yield (
                f"{printable(name)} {printable(version(name))} is installed, which has the import "
                f"name multimm, too: it and {DISTRIBUTION} overwrite each other's files"
            )


def _asked_in_vain(found: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Requirements of distributions on others of them, by version, that these do not fulfil."""
    from packaging.requirements import Requirement

    for name, number in found.items():
        # Of our own extras what GPUs need counts, where that is installed.
        extras = ("cuda12", "cuda13") if name == DISTRIBUTION and "dask-cuda" in found else ("",)
        for requirement in map(Requirement, requires(name) or ()):
            other, marker = found.get(requirement.name), requirement.marker
            applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
            if other and applies and not requirement.specifier.contains(other, prereleases=True):
                needed = f"{requirement.name}{requirement.specifier}"
                yield f"{name} {number} needs {needed}, found {other}", needed


def _nvlinks(module: Any, gpus: tuple[Gpu, ...]) -> dict[tuple[int, int], int]:
    handles = [nvml_handle(module, gpu.ident) for gpu in gpus]
    buses = [str(module.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    links: dict[tuple[int, int], int] = {}
    for i, handle in enumerate(handles):
        for remote in _remotes(module, handle):
            # What is not one of our GPUs is a switch, which reaches every other GPU.
            peers = [buses.index(remote)] if remote in buses else range(len(gpus))
            for j in peers:
                if j > i:
                    links[i, j] = links.get((i, j), 0) + 1
    return links


def _remotes(module: Any, handle: Any) -> Iterator[str]:
    """Bus addresses at the other ends of a GPU's active links."""
    for link in range(module.NVML_NVLINK_MAX_LINKS):
        try:
            if module.nvmlDeviceGetNvLinkState(handle, link):
                yield str(module.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
        except module.NVMLError:
            # Without NVLink, or past the last link.
            return


def findings(facts: Facts) -> list[Finding]:
    """What does not fit together, what is missing and what to know."""
    return [*_same_name(facts), *_unmet(facts), *_devices(facts), *_cupy(facts), *_builds(facts)]


def usable(found: list[Finding]) -> bool:
    """Nothing found makes multimm fail here."""
    return all(finding.level == "note" for finding in found)


def _same_name(facts: Facts) -> Iterator[Finding]:
    """Who comes later overwrites files of the other, and who is uninstalled takes them away."""
    remedy = f"pip uninstall multimm {DISTRIBUTION}; {how_to_install()}"
    for sentence in facts.same_name:
        yield Finding("problem", sentence, remedy)


def _unmet(facts: Facts) -> Iterator[Finding]:
    """What packages ask of each other, by their own word."""
    for sentence, requirement in facts.unmet:
        yield Finding("problem", sentence, f"pip install '{requirement}'")


def _devices(facts: Facts) -> Iterator[Finding]:
    if not facts.gpus:
        reason = "no NVIDIA driver" if facts.driver is None else "no GPU visible to this process"
        yield Finding("note", f"{reason}: products run on CPU workers")
        return
    missing = [name for name in GPU_PACKAGES if not facts.packages.get(name)]
    if missing:
        yield Finding(
            "problem",
            f"{len(facts.gpus)} GPU(s) found, but not installed: {', '.join(missing)}",
            install_command(facts.cuda),
        )


def _cupy(facts: Facts) -> Iterator[Finding]:
    builds = facts.packages.get("cupy", ())
    if len(builds) > 1:
        names = [name for name, _ in builds]
        yield Finding(
            "problem",
            f"{len(builds)} builds of CuPy are installed over each other: {', '.join(names)}",
            f"pip uninstall {' '.join(names)}; {install_command(facts.cuda)}",
        )
    for name, _ in builds:
        major = _cuda_of(name)
        if major is not None and facts.cuda is not None and major > facts.cuda[0]:
            yield Finding(
                "problem",
                f"{name} is for CUDA {major}, the driver runs CUDA up to "
                f"{facts.cuda[0]}.{facts.cuda[1]}",
                f"pip uninstall {name}; {install_command(facts.cuda)}; or update the driver",
            )


def _cuda_of(name: str) -> int | None:
    """The CUDA version in a distribution's name: cupy-cuda13x, rmm-cu12."""
    digits = name.rpartition("-cu")[2].removeprefix("da").removesuffix("x")
    return int(digits) if digits.isdigit() else None


def _builds(facts: Facts) -> Iterator[Finding]:
    builds = {
        name: _cuda_of(name)
        for found in facts.packages.values()
        for name, _ in found
        if _cuda_of(name) is not None
    }
    if len(set(builds.values())) > 1:
        yield Finding(
            "problem",
            f"builds for different CUDA versions: {', '.join(builds)}",
            f"pip uninstall {' '.join(builds)}; {install_command(facts.cuda)}",
        )
