"""What all tests share: hardware marks, the guard against computing, hypothesis profiles."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dask
import pytest
from hypothesis import HealthCheck, settings
from kept import arrays_behind

from multimm.cluster.inspect.devices import visible_gpus
from multimm.gpu.runtime import launch_cache

#: Of what Dask imports where it finds it, which takes half of its start: what workers and commands
#: that tests start do not find. Tests themselves do.
WITHOUT = Path(__file__).parent / "without"

#: Deadlines are off: the first example pays for imports and compilation.
settings.register_profile(
    "dev", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "ci", parent=settings.get_profile("dev"), derandomize=True, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled kernels with pytest's own files, and nobody's measured rates among them."""
    # Workers and commands inherit it. A test that tunes or measures names a directory of its own.
    kept = os.environ.get("MULTIMM_TEST_CACHE")
    if kept is None:
        cache = getattr(config, "cache", None)  # -p no:cacheprovider leaves it out
        kept = tempfile.mkdtemp() if cache is None else str(cache.mkdir("multimm"))
    os.environ["MULTIMM_CACHE_DIR"] = kept
    os.environ["DASK_MULTIMM__MEASURE_AT_START"] = "False"
    # A hundred looks a second at what each worker's threads do: time, and Python 3.11 may crash
    # where one reads the line of a frame that another thread runs.
    os.environ["DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED"] = "False"
    dask.config.refresh()
    if not getattr(config.option, "numprocesses", None):  # processes of pytest-xdist have all
        paths = [str(WITHOUT), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


@pytest.fixture(autouse=True, scope="session")
def nothing_kept_refers_to_arrays() -> Iterator[None]:
    """Whatever a test computes: what is kept for the next call of its kind frees its operands."""
    original = launch_cache.keep

    def keep(*args: Any, run: Any, **kwargs: Any) -> None:
        assert not arrays_behind(run), "operands would stay in memory for as long as this is kept"
        original(*args, run=run, **kwargs)

    launch_cache.keep = keep
    yield
    launch_cache.keep = original


_left_out = pytest.StashKey[Counter[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this machine cannot run; skips by the hundred would hide real ones."""
    count = len(visible_gpus())
    reasons = Counter[str]()
    kept, dropped = [], []
    for item in items:
        reason = _missing(item, count)
        if reason:
            reasons[reason] += 1
        (dropped if reason else kept).append(item)
    config.stash[_left_out] = reasons
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """One line that says how many tests were left out and why."""
    reasons = config.stash.get(_left_out, Counter())
    if not reasons:
        return []
    details = "; ".join(f"{count} for lack of {reason}" for reason, count in reasons.items())
    return [f"left out {sum(reasons.values())} hardware tests: {details}"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests that pass have to say: a ``note`` that they record as a property."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "note":
                terminalreporter.write_line(f"{report.nodeid}: {text}")


def _missing(item: pytest.Item, gpus: int) -> str:
    """What `item` needs and this machine lacks; empty where it can run."""
    several = item.get_closest_marker("multigpu")
    if several is None and item.get_closest_marker("gpu") is None:
        return ""
    needed = several.args[0] if several is not None else 1
    if gpus < needed:
        return f"{needed} GPU(s), found {gpus}"
    modules = ("cupy", "dask_cuda") if several is not None else ("cupy",)
    return " and ".join(name for name in modules if find_spec(name) is None)


class ComputedTooEarlyError(Exception):
    """A graph was computed where only building it was expected."""


@pytest.fixture
def no_compute() -> Iterator[None]:
    """Whoever computes a Dask collection during this test fails it."""

    def refuse(graph: object, keys: object, **_: object) -> None:
        raise ComputedTooEarlyError(f"computed {keys!r} while only a graph was to be built")

    with dask.config.set(scheduler=refuse):
        yield


@pytest.fixture
def in_tmp_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names of files are those of this folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def in_this_thread() -> Iterator[None]:
    """Whatever is computed runs here."""
    with dask.config.set(scheduler="sync"):
        yield


@pytest.fixture
def gpu_in_numpy() -> Iterator[None]:
    """CuPy and kernels are those of `stand_in`."""
    from stand_in import standing_in

    with standing_in():
        yield


@pytest.fixture
def known_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records name this commit, whatever is checked out."""
    monkeypatch.setenv("MULTIMM_COMMIT", "0123456789abcdef")


@pytest.fixture
def rates_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where measured rates are kept; nothing is known yet."""
    from multimm.cluster.calibration import store

    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path / "cache"))
    store.forget()
    yield tmp_path / "cache" / "rates.json"
    store.forget()
