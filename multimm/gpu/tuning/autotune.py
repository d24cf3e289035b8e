"""Which configuration was fastest on this GPU, found by `multimm tune`, kept between runs.

A winner is only ever a configuration with the bits of the one that `simt.configs.choose` takes:
tuning changes the time of a product and nothing else, so that no result depends on what lies in
somebody's cache. It holds for the sizes that it was timed at, for one GPU model and for the
kernels as they are now; whatever does not match is ignored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from multimm.gpu.arch import STRIP, Device
from multimm.gpu.runtime import file_cache, launch_cache
from multimm.gpu.simt.configs import REGISTRY, TileConfig, entry_named
from multimm.gpu.strides import GemmSizes

logger = logging.getLogger(__name__)

#: The default stays unless another configuration is faster by more than what repeats of the
#: same one differ by.
NOISE = 0.02
#: A sample lasts about this long, as far as MAX_LAUNCHES reach; arbitrary.
SAMPLE_SECONDS = 0.002
MAX_LAUNCHES = 50
MIN_ROUNDS = 5
_FORMAT = 1
#: More rows, columns or terms than a GPU holds.
_LARGEST = 2**48


class Case(NamedTuple):
    """A product of two matrices: its sizes, and which operands are stored transposed."""

    m: int
    n: int
    k: int
    trans_a: bool = False
    trans_b: bool = False

    @property
    def sizes(self) -> GemmSizes:
        """As `simt.configs.choose` sees it, of operands in C order that are aligned to 16 bytes."""
        return GemmSizes(
            self.m, self.n, self.k, 1,
            scattered_a=not self.trans_a, scattered_b=self.trans_b,
            ragged_a=self.trans_a and self.m % STRIP != 0,
            ragged_b=not self.trans_b and self.n % STRIP != 0,
        )  # fmt: skip

    def __str__(self) -> str:
        """As the command line writes it."""
        return f"{self.m}x{self.n}x{self.k} {'nt'[self.trans_a]}{'nt'[self.trans_b]}"


class Timing(NamedTuple):
    """One configuration: median seconds of a launch, or why it is out of the race."""

    name: str
    seconds: float
    reason: str = ""


class Outcome(NamedTuple):
    """All configurations of one case, the default one first."""

    case: Case
    timings: tuple[Timing, ...]

    @property
    def default(self) -> Timing:
        """What runs without tuning."""
        return self.timings[0]

    @property
    def winner(self) -> Timing:
        """The fastest; the default if none beats it by more than noise."""
        valid = [timing for timing in self.timings if timing.seconds > 0]  # NaN is out
        best = min(valid, key=lambda timing: timing.seconds, default=self.default)
        return best if best.seconds < (1 - NOISE) * self.default.seconds else self.default


class Bench(Protocol):
    """A case on a GPU; `bench.GpuBench` is the real one."""

    def wrong(self, name: str) -> str:
        """Why a configuration must not be used; empty if its result is right."""

    def seconds(self, name: str, launches: int) -> float:
        """Time per launch of so many in a row."""


class Model(NamedTuple):
    """What winners belong to."""

    gpu: str
    capability: int

    @property
    def path(self) -> Path | None:
        """The file of this model's winners."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        home = file_cache.directory()
        return home and home / "tuned" / f"{slug}-sm_{self.capability}.json"


def candidates(default: TileConfig, device: Device) -> dict[str, TileConfig]:
    """The configurations that run on a device by their names, the default one first."""
    named = {entry.name: entry.config for entry in REGISTRY}
    first = next((name for name, config in named.items() if config == default), "default")
    legal = {
        name: config
        for name, config in named.items()
        if config.blocks_per_multiprocessor(device.limits)
    }
    return {first: default} | legal


def tune(case: Case, names: Sequence[str], bench: Bench, seconds: float) -> Outcome:
    """Check all configurations, then time the right ones in turns.

    Parameters
    ----------
    case : Case
    names : sequence of str
        The default first: a wrong default ends the case.
    bench : Bench
    seconds : float
        How long to measure, about.
    """
    reasons = {name: bench.wrong(name) for name in names}
    running = [] if reasons[names[0]] else [name for name in names if not reasons[name]]
    launches = {name: _launches(bench.seconds(name, 3)) for name in running}
    samples: dict[str, list[float]] = {name: [] for name in running}
    end, rounds = time.monotonic() + seconds, 0
    while running and (rounds < MIN_ROUNDS or time.monotonic() < end):
        # Whoever runs first in a round meets another clock and temperature: take turns.
        first = rounds % len(running)
        for name in running[first:] + running[:first]:
            samples[name].append(bench.seconds(name, launches[name]))
        rounds += 1
    timings = (
        Timing(name, median(samples.get(name, [float("nan")])), reasons[name]) for name in names
    )
    return Outcome(case, tuple(timings))


def _launches(seconds: float) -> int:
    return max(1, min(MAX_LAUNCHES, round(SAMPLE_SECONDS / max(seconds, 1e-9))))


def save(model: Model, outcomes: Sequence[Outcome]) -> Path | None:
    """Add winners to those of earlier runs; return the file, or None if it cannot be written."""
    path = model.path
    if path is None:
        return None
    with file_cache.alone(path):
        # A default needs no record, and may change with the next version.
        kept = read(model)
        for one in outcomes:
            kept.pop(one.case, None)
            if one.winner is not one.default:
                kept[one.case] = one.winner.name
        written = file_cache.write(path, json.dumps(_content(model, kept), indent=1).encode())
    winners_on.cache_clear()
    launch_cache.forget()  # products that run without them
    return path if written else None


def _content(model: Model, winners: Mapping[Case, str]) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "gpu": model.gpu,
        "capability": model.capability,
        "kernels": kernels_hash(),
        "winners": [{**case._asdict(), "config": name} for case, name in sorted(winners.items())],
    }


def read(model: Model) -> dict[Case, str]:
    """The winners of a GPU model; none where the file is missing, damaged or out of date."""

    def parse(content: Any) -> dict[Case, str]:
        expected = (_FORMAT, model.gpu, model.capability, kernels_hash())
        if tuple(content[key] for key in ("format", "gpu", "capability", "kernels")) != expected:
            raise file_cache.OtherVersionError("was tuned for other kernels")
        return dict(_winner(record) for record in content["winners"])

    return file_cache.load(model.path, parse, "run multimm tune again") or {}


def _winner(record: Mapping[str, Any]) -> tuple[Case, str]:
    m, n, k = (file_cache.integer(record[name], 1, _LARGEST) for name in ("m", "n", "k"))
    trans_a, trans_b = record["trans_a"], record["trans_b"]
    if type(trans_a) is not bool or type(trans_b) is not bool:
        raise TypeError(f"not a product: {record!r}")
    if not any(entry.name == record["config"] for entry in REGISTRY):
        raise ValueError(f"no configuration is named {record['config']!r}")
    return Case(m, n, k, trans_a, trans_b), record["config"]


@functools.cache
def kernels_hash() -> str:
    """Of everything that decides which configuration wins: kernel texts and the registry."""
    digest = hashlib.sha256(repr([(entry.name, entry.config) for entry in REGISTRY]).encode())
    folder = resources.files("multimm.gpu").joinpath("cuda")
    files = [
        file
        for part in (folder, folder.joinpath("common"))
        for file in part.iterdir()
        if file.name.endswith((".cu", ".cuh"))
    ]
    for file in sorted(files, key=lambda file: file.name):
        if file.name.startswith("sgemm") or file.name.endswith(".cuh"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def model_of(device: int) -> Model:
    """The model of a CUDA device."""
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(device)["name"]
    return Model(name.decode(), int(cupy.cuda.Device(device).compute_capability))


@functools.cache
def winners_on(device: int) -> dict[Case, str]:
    """The winners for a CUDA device of this process, read once."""
    return read(model_of(device))


def lookup(device: int, sizes: GemmSizes, trans_a: bool, trans_b: bool) -> TileConfig | None:
    """The tuned configuration of a product, for callers that compute on one GPU.

    Parameters
    ----------
    device : int
    sizes : GemmSizes
        Of one product of operands that can be copied as those that were timed; others are
        not tuned.
    trans_a, trans_b : bool
        Whether the operands lie in memory transposed.

    Returns
    -------
    TileConfig or None
        None where nothing was tuned: `simt.configs.choose` decides.
    """
    case = Case(sizes.m, sizes.n, sizes.k, trans_a, trans_b)
    name = winners_on(device).get(case)
    if name is None or sizes != case.sizes:
        return None
    config: TileConfig = entry_named(REGISTRY, name).config
    return config
