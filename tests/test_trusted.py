"""What somebody else could have left in the user's cache, and what is damaged there. No GPU."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest

import multimm
from multimm.cluster.calibration import store
from multimm.cluster.calibration.store import DeviceRates, LinkRates, Rates
from multimm.cluster.start import private_scratch
from multimm.gpu.runtime import file_cache, nvrtc
from multimm.gpu.runtime import jit as compiling
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

STRANGER = 54321
FOUND = Rates(
    (DeviceRates(H200.name, H200.gflops, 60_000.0, 3e3, (("float32", 170_000.0),), "2026-11-21"),),
    (LinkRates("ucxx", H200.name, False, 100.0, 2e-4, "2026-11-21"),),
)


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Compiles nothing, and counts."""
    fake = SimpleNamespace(compiled=0, version=lambda: (13, 0), architectures=lambda: (90,))

    def compile_(text, options, *, ptx):
        fake.compiled += 1
        return b"\x7fELF of " + text.encode(), ""

    fake.compile = compile_
    monkeypatch.setattr(nvrtc, "find", lambda: fake)
    return fake


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """The cache of this test."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(folder))
    another_process()
    yield folder
    another_process()


def another_process():
    """Forget all but files."""
    store.forget()
    for said in (file_cache._unwritable, file_cache._refused):
        said.cache_clear()


def kernel():
    with compiling.compiled_file("text", "sm_90", "name") as path:
        assert path.read_bytes() == b"\x7fELF of text"
        return path


class Rated:
    """Each kind of cache: how it is written and read, and where it lies."""

    @staticmethod
    def write():
        return store.keep(FOUND) is not None

    @staticmethod
    def known():
        store.forget()
        return store.stored() == FOUND

    file = Path("rates.json")


class Compiled:
    @staticmethod
    def write():
        return kernel().exists()

    @staticmethod
    def known():
        before = nvrtc.find().compiled
        kernel()
        return nvrtc.find().compiled == before

    file = Path("kernels/name-*.cubin")


KINDS = [Rated, Compiled]
every_kind = pytest.mark.parametrize("kind", KINDS)


def the_file(home, kind):
    (path,) = home.glob(str(kind.file))
    return path


def to_a_stranger(path, monkeypatch):
    """Give a file to another user, or become one."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@every_kind
def test_what_is_kept_is_for_its_user_alone(home, kind):
    home.rmdir()
    before = os.umask(0)
    try:
        assert kind.write()
    finally:
        os.umask(before)
    assert kind.known()
    for path in (home, *home.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# ------------------------------------------------------------------- others' files


@every_kind
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777], ids=oct)
@pytest.mark.parametrize("level", ["cache", "its folder"])
def test_a_folder_that_others_can_write_to_is_not_used(home, kind, mode, level, caplog):
    assert kind.write()
    folder = home if level == "cache" else the_file(home, kind).parent
    folder.chmod(mode)
    another_process()
    before = sorted(home.rglob("*"))
    assert not kind.known()
    (said,) = warnings(caplog)
    assert f"others can write to {folder} " in said
    assert f"chmod go-w {folder}" in said
    # Work goes on without it, and nothing is written there.
    kind.write()
    assert sorted(home.rglob("*")) == before
    assert len([one for one in warnings(caplog) if "others can write" in one]) == 1
    folder.chmod(0o700)
    another_process()
    assert kind.known()


@every_kind
@pytest.mark.parametrize(("mode", "used"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_others_must_not_put_another_folder_in_the_place_of_the_cache(
    tmp_path, monkeypatch, kind, mode, used
):
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(mode)
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(parent / "deep" / "cache"))
    kind.write()
    another_process()
    assert kind.known() == used
    assert any(parent.iterdir()) == used


def test_links_lead_to_the_cache_where_nobody_else_can_change_it(home, tmp_path, monkeypatch):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to(home.parent)
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path / "one" / "cache"))
    assert Rated.write()
    assert the_file(home, Rated).exists()
    home.chmod(0o777)
    another_process()
    assert not Rated.known()


# ------------------------------------------------------------------- damaged files


def nested(depth):
    return b"[" * depth + b"]" * depth


DAMAGED = {
    "empty": b"",
    "cut off": None,
    "null": b"null",
    "a list": b"[]",
    "a number": b"1e400",
    "deep": nested(200_000),
    "deep inside": b'{"format": 3, "devices": ' + nested(200_000) + b', "links": []}',
    "huge": b'{"format": ' + b"9" * 100_000 + b"}",
    "not UTF-8": b"\xff\xfe\x00\xd8",
    "binary": bytes(range(256)) * 20,
    "zeros": bytes(4096),
}


def damaged(content):
    def damage(path, *_):
        path.write_bytes(path.read_bytes()[:-3] if content is None else content)

    return damage


def link(path, elsewhere, _):
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def pipe(path, *_):
    path.unlink()
    os.mkfifo(path, 0o600)


def listener(path, _, monkeypatch):
    path.unlink()
    monkeypatch.chdir(path.parent)  # such names are short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)


def given_away(path, _, monkeypatch):
    path.chmod(0o644)
    to_a_stranger(path, monkeypatch)


#: What may have become of a file, and what is said of it.
SPOILT = {
    "another user's": (given_away, "another user"),
    "others can write to it": (lambda path, *_: path.chmod(0o620), "others can write to {path}"),
    "a link": (link, ""),
    "a pipe": (pipe, ""),
    "a socket": (listener, ""),
    **{name: (damaged(content), "{path} is damaged") for name, content in DAMAGED.items()},
}


@every_kind
@pytest.mark.parametrize("name", SPOILT)
def test_a_file_that_is_not_to_be_trusted_is_not_used_and_is_replaced(
    home, tmp_path, kind, name, monkeypatch, caplog
):
    """Nobody waits for the other end of a pipe, and nothing is written through a link."""
    spoil, said = SPOILT[name]
    assert kind.write()
    path, elsewhere = the_file(home, kind), tmp_path / "elsewhere"
    good = path.read_bytes()
    spoil(path, elsewhere, monkeypatch)
    another_process()
    assert not kind.known()
    first, *more = warnings(caplog)
    assert said.format(path=path) in first
    assert not more or name not in DAMAGED
    if home.stat().st_uid != os.geteuid():  # only root gives files away: who does not is another
        return
    assert kind.write()
    another_process()
    assert kind.known()
    found = path.lstat()
    assert stat.S_ISREG(found.st_mode)
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.geteuid())
    assert not elsewhere.exists() or elsewhere.read_bytes() == good


def edited(path, **changes):
    """Change some values of rates that were written, of the device or of the link that has them."""
    content = json.loads(path.read_text())
    for name, value in changes.items():
        for entry in content["devices"] + content["links"]:
            if name in entry:
                entry[name] = value
    path.write_text(json.dumps(content))


NO_RATES = [-5, float("nan"), float("inf"), "1", None, []]


@pytest.mark.parametrize("value", NO_RATES, ids=lambda value: f"{value!r:.9}")
@pytest.mark.parametrize("name", ["gflops", "copy_gbps", "packed_gflops", "gbps", "latency_s"])
def test_rates_that_nothing_has_make_no_plan(home, name, value, caplog):
    if name == "packed_gflops":
        value = [["float32", value]]
    store.keep(FOUND)
    edited(home / "rates.json", **{name: value})
    store.forget()
    assert store.stored() == Rates()
    assert len(warnings(caplog)) == 1
    spec = store.applied(ClusterSpec.homogeneous(H200, 4), store.stored())
    side = MatrixSpec((65536, 65536))
    assert 0.1 < multimm.plan(side, side, cluster=spec).seconds < 60


# ------------------------------------------------------------------- where files lie


def test_variables_that_name_no_folder_are_passed_over(monkeypatch, tmp_path):
    monkeypatch.delenv("MULTIMM_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")
    assert file_cache.directory() == tmp_path / ".cache" / "multimm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    for useless in ("", "relative"):
        monkeypatch.setenv("HOME", useless)
        found = file_cache.directory()
        assert found is None or found.is_absolute()
        assert found != Path("/.cache/multimm")
    monkeypatch.setattr(os, "geteuid", lambda: 2**31 - 7)  # nobody's number
    assert file_cache.directory() is None
    assert "set MULTIMM_CACHE_DIR" in file_cache.obstacle()
    monkeypatch.setenv("MULTIMM_CACHE_DIR", "here")
    assert file_cache.directory() == Path.cwd() / "here"


@every_kind
def test_without_a_home_all_works(monkeypatch, kind):
    for name in ("MULTIMM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/none")
    Rated.write()
    another_process()
    assert not Rated.known()


def scratch_folder():
    """Where nodes that are started now would keep what they spill."""
    with private_scratch():
        return dask.config.get("temporary-directory")


def test_workers_spill_where_nobody_else_writes(tmp_path):
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        first = scratch_folder()
        assert stat.S_IMODE(os.stat(first).st_mode) == 0o700
        assert scratch_folder() == first
        assert dask.config.get("temporary-directory") == str(tmp_path)
        # Somebody else was there first.
        os.chmod(first, 0o777)
        other = scratch_folder()
        assert other != first
        assert stat.S_IMODE(os.stat(other).st_mode) == 0o700
        assert Path(other).parent == tmp_path
