"""Matrices behind addresses: read as they were opened, or a line that says why not."""

from __future__ import annotations

import itertools
import logging
import ssl
import traceback
from io import StringIO
from types import SimpleNamespace

import dask
import fsspec
import h5py
import numpy as np
import object_server
import pytest
import s3fs
import zarr
from clusters import in_threads
from commands import python
from distributed import Client
from repeated import others_slow

import multimm
from multimm import io
from multimm.errors import FileFormatError

A = np.arange(12.0).reshape(3, 4)
#: What is served, and the object of each that the middle of it lies in.
PARTS = {
    "x.npy": "x.npy",
    "x.h5": "x.h5",
    "x.zarr": "x.zarr/c/1/0",
    "shards.zarr": "shards.zarr/c/0/0",
    "v2.zarr": "v2.zarr/1.0",
}
NAMES = [*PARTS, "x.h5:x", "g.zarr/run/x"]
parts = pytest.mark.parametrize("name", PARTS)
some_parts = pytest.mark.parametrize("name", others_slow(PARTS, "x.h5", "shards.zarr", "v2.zarr"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All files, and a certificate."""
    path = tmp_path_factory.mktemp("served")
    np.save(path / "x.npy", A)
    with h5py.File(path / "x.h5", "w") as file:
        file["x"] = A
    plain = {"data": A, "chunks": (1, 4), "compressors": None}
    zarr.create_array(path / "x.zarr", **plain)
    zarr.create_array(path / "v2.zarr", zarr_format=2, **plain)
    zarr.create_array(path / "shards.zarr", data=A, chunks=(1, 4), shards=(3, 4))
    zarr.create_group(path / "g.zarr").create_array("run/x", **plain)
    object_server.make_certificate(path / "certificate.pem")
    return path


def files(folder, prefix="", **how):
    """All files as a server's objects."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    contents = {f"{prefix}{path.relative_to(folder)}": path.read_bytes() for path in paths}
    return object_server.Objects(contents, **how)


@pytest.fixture(scope="module", params=["https", "s3"])
def server(request, folder):
    """A server of these files: its objects, its address, and what their paths begin with."""
    s3, certificate = request.param == "s3", folder / "certificate.pem"
    objects = files(folder, "bucket/" if s3 else "")
    with (
        pytest.MonkeyPatch.context() as patch,
        object_server.served(objects, None if s3 else certificate) as address,
    ):
        if s3:
            once = {"retries": {"max_attempts": 0}, "connect_timeout": 5}
            options = {"endpoint_url": address, "key": "k", "secret": "s", "config_kwargs": once}
            patch.setattr(s3fs.S3FileSystem, "retries", 1)
        else:
            options = {"ssl": ssl.create_default_context(cafile=certificate)}
        patch.setitem(fsspec.config.conf, request.param, options)
        yield objects, "s3://bucket" if s3 else address, "bucket/" if s3 else ""


@pytest.fixture
def site(server):
    """The same, as it was at first."""
    objects, address, prefix = server
    contents = dict(objects)
    yield SimpleNamespace(objects=objects, address=address, prefix=prefix)
    objects.restore(contents)


def refusal(call):
    """The one line of an error."""
    with pytest.raises(FileFormatError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_all_formats_are_read(site):
    for name in NAMES:
        np.testing.assert_array_equal(io.open_array(f"{site.address}/{name}").compute(), A)
    a, b = (io.open_array(f"{site.address}/{name}", chunks=2) for name in ("x.npy", "x.zarr"))
    np.testing.assert_array_equal(multimm.matmul(a, b.T).compute(), A @ A.T)


@some_parts
def test_an_object_that_is_replaced_or_gone_is_named(site, name):
    opened, path = io.open_array(f"{site.address}/{name}"), site.prefix + PARTS[name]
    before = site.objects[path]
    site.objects[path] = before[:-8] + np.float64(77).tobytes()
    text = refusal(opened.compute)
    assert text.startswith(f"{site.address}/{PARTS[name]}: changed after")
    del site.objects[path]
    text = refusal(opened.compute)
    assert text.startswith(f"{site.address}/{PARTS[name]}: is gone")
    site.objects[path] = before
    np.testing.assert_array_equal(opened.compute(), A)


@some_parts
def test_an_object_that_is_replaced_while_it_is_read_is_named(site, name):
    opened, path = io.open_array(f"{site.address}/{name}"), site.prefix + PARTS[name]
    contents = [site.objects[path][:-8] + np.float64(number).tobytes() for number in range(99)]

    def replace(asked):
        if asked == path:
            site.objects[path] = contents.pop()

    site.objects.before = replace
    assert refusal(opened.compute).startswith(f"{site.address}/{PARTS[name]}: changed after")


def test_a_chunk_that_comes_into_being_is_named(site):
    path = f"{site.prefix}x.zarr/c/1/0"
    content = site.objects.pop(path)
    opened = io.open_array(f"{site.address}/x.zarr")
    filled = opened.compute()
    assert not filled[1].any()
    site.objects[path] = content
    assert "x.zarr/c/1/0: came into being" in refusal(opened.compute)


@pytest.mark.parametrize(
    "name", ["no.npy", "no.h5", "no.zarr", "no.zarr/x", "x.h5:no", "g.zarr/no"]
)
def test_what_is_not_there_is_named(site, name):
    text = refusal(lambda: io.open_array(f"{site.address}/{name}"))
    assert text.startswith(f"{site.address}/{name[: name.index('.')]}")


@parts
def test_refused_access_is_no_missing_file(site, name):
    opened = io.open_array(f"{site.address}/{name}")
    site.objects.refused.add(site.prefix + PARTS[name])
    calls = [opened.compute]
    if name == PARTS[name]:
        calls.append(lambda: io.open_array(f"{site.address}/{name}"))
    for call in calls:
        text = refusal(call)
        assert text.startswith(f"{site.address}/{name}")
        assert "cannot be read" in text
        assert "Forbidden" in text or "AccessDenied" in text


@some_parts
def test_an_object_that_ends_early_is_an_error(site, name):
    opened = io.open_array(f"{site.address}/{name}")
    site.objects.cut.add(site.prefix + PARTS[name])
    assert refusal(opened.compute).startswith(f"{site.address}/{name}")


def test_a_server_that_goes_away_is_named(folder):
    objects = files(folder)
    with object_server.served(objects) as address:
        found = [io.open_array(f"{address}/{name}") for name in ("x.npy", "x.h5", "x.zarr")]
    for array in found:
        text = refusal(array.compute)
        assert text.startswith(f"{address}/x.")
        assert "cannot be read" in text


def test_a_group_that_nobody_can_list_needs_a_name(site):
    if site.prefix:  # S3 lists
        np.testing.assert_array_equal(io.open_array(f"{site.address}/g.zarr").compute(), A)
    else:
        assert "name an array" in refusal(lambda: io.open_array(f"{site.address}/g.zarr"))


def test_over_http_changes_of_many_chunks_are_warned_of(folder, monkeypatch):
    monkeypatch.setattr("multimm.files.zarr.MOST_ASKED", 2)
    objects = files(folder)
    with object_server.served(objects) as address:
        with pytest.warns(UserWarning, match=rf"{address}/x\.zarr: has 3 chunks"):
            opened = io.open_array(f"{address}/x.zarr")
        np.testing.assert_array_equal(opened.compute(), A)


def test_without_tags_the_time_of_a_change_tells(folder):
    objects = files(folder, tags=False)
    with object_server.served(objects) as address:
        opened = [io.open_array(f"{address}/{name}") for name in NAMES]
        for array in opened:
            np.testing.assert_array_equal(array.compute(), A)
        objects.date = "Thu, 02 Jan 2025 00:00:00 GMT"
        for array in opened:
            assert "changed after" in refusal(array.compute)
        objects.date = None
        with pytest.warns(UserWarning, match=rf"{address}/x\.npy: nothing says when"):
            io.open_array(f"{address}/x.npy")


def test_a_server_without_parts_is_said(folder):
    objects = files(folder, ranges=False)
    with object_server.served(objects) as address:
        assert "parts of it" in refusal(lambda: io.open_array(f"{address}/x.npy"))
        np.testing.assert_array_equal(io.open_array(f"{address}/x.zarr").compute(), A)


def test_a_certificate_nobody_knows_is_refused_and_one_from_the_environment_is_not(folder):
    objects = files(folder)
    certificate = folder / "certificate.pem"
    with object_server.served(objects, certificate) as address:
        text = refusal(lambda: io.open_array(f"{address}/x.npy"))
        assert text.startswith(f"{address}/x.npy: cannot be read")
        assert "CERTIFICATE" in text
        code = (
            f"from multimm import io; print(io.open_array({address + '/x.npy'!r}).compute().sum())"
        )
        run = python("-c", code, env={"SSL_CERT_FILE": str(certificate)})
        assert run.stdout.split() == [str(A.sum())], run.stderr


SECRET = "hunter2/secret"


@pytest.mark.parametrize(
    "address", [f"s3://AKIA:{SECRET}@bucket/x.npy", f"https://h/x.zarr?X-Amz-Signature={SECRET}"]
)
def test_secrets_of_an_address_are_not_repeated(address, tmp_path):
    text = refusal(lambda: io.save_array(A, address))
    assert text.startswith(address.replace(SECRET, "***").replace("AKIA:", ""))
    run = python("-m", "multimm", "matmul", address, address, address)
    assert run.returncode == 2
    assert SECRET not in run.stderr


@pytest.fixture
def log():
    """What Dask's workers log."""
    written = StringIO()
    handler = logging.StreamHandler(written)
    logging.getLogger("distributed").addHandler(handler)
    yield written.getvalue
    logging.getLogger("distributed").removeHandler(handler)


@pytest.mark.parametrize(
    ("scheduler", "name"),
    others_slow(
        itertools.product(["threads", "distributed"], PARTS),
        *(("threads", "x.npy"), ("threads", "shards.zarr")),
        *(("distributed", "x.h5"), ("distributed", "x.zarr")),
    ),
)
def test_what_goes_wrong_keeps_its_type_and_its_secret(folder, name, scheduler, log):
    objects = files(folder, date=None, tags=False)
    with (
        object_server.served(objects) as address,
        in_threads(1) as cluster,
        Client(cluster),
        dask.config.set(scheduler=scheduler),
    ):
        private = address.replace("://", "://AKIA:hunter2@") + f"/{name}"
        shown = address.replace("://", "://***@") + f"/{name}"
        with pytest.warns(UserWarning, match="nothing says when") as warned:
            x = io.open_array(private, chunks=2)
        np.testing.assert_array_equal(x.compute(), A)
        told = [str(one.message) for one in warned]
        told += [repr(task.args) for task in dict(x.dask).values()]
        objects.refused.add(PARTS[name])
        for lazy in (x, multimm.matmul(x, x.T, blocks=2, slabs=2)):
            with pytest.raises(FileFormatError) as caught:
                lazy.compute()
            assert str(caught.value).startswith(shown)
            told.append("".join(traceback.format_exception(caught.value)))
    text = "".join([*told, log()])
    assert "hunter2" not in text
    assert "AKIA" not in text


@pytest.mark.parametrize("name", ["link", "group/x", "soft"])
def test_a_link_to_another_file_is_not_followed_within_this_one(tmp_path, name):
    """HDF5 looks in what it has open for what the other file has under that name."""
    path = tmp_path / "links.h5"
    with h5py.File(path, "w") as file:
        file["x"] = A
        file["link"] = h5py.ExternalLink("/elsewhere/other.h5", "/x")
        file["group"] = h5py.ExternalLink("/elsewhere/other.h5", "/")
        file["soft"] = h5py.SoftLink("/group/x")
    fsspec.filesystem("memory").pipe("/links.h5", path.read_bytes())
    text = refusal(lambda: io.open_array("memory://links.h5", dataset=name))
    assert "another file, /elsewhere/other.h5" in text
    np.testing.assert_array_equal(io.open_array("memory://links.h5", dataset="x").compute(), A)


def test_a_missing_package_is_named():
    code = """
import sys
for address, package in [("s3://b/x.npy", "s3fs"), ("https://h/x.npy", "aiohttp")]:
    sys.modules[package] = None
    from multimm import io
    try:
        io.open_array(address)
    except Exception as error:
        print(error)
"""
    lines = python("-c", code).stdout.splitlines()
    for line, start, named in zip(
        lines,
        ("s3://b/x.npy: ", "https://h/x.npy: "),
        ("Install s3fs", '"aiohttp" to be installed'),
        strict=True,
    ):
        assert line.startswith(start)
        assert named in line
