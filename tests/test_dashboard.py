"""The dashboard of a cluster from start(): there when it is opened, and no cost before."""

from __future__ import annotations

import socket
import sys
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.parse import urlsplit

import dask
import distributed  # noqa: F401  its configuration has the routes
import pytest
from clusters import forked
from tornado.web import Application, RequestHandler

import multimm.cluster as mc

#: distributed's own, which imports bokeh.
PAGES = "distributed.dashboard.scheduler"
ROUTES = "distributed.scheduler.http.routes"


@pytest.fixture(scope="module")
def client():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # somebody else has it already
            other.bind(("127.0.0.1", 8787))
        other.listen()
        # Without bokeh, any scheduler with a dashboard leaves a page of Dask that says so.
        routes = [x for x in dask.config.get(ROUTES) if not x.endswith("missing_bokeh")]
        with (
            dask.config.set({ROUTES: routes}),
            forked(),
            mc.start(workers=1, memory_limit="1GB") as client,
        ):
            yield client


def opened(link):
    with urllib.request.urlopen(link, timeout=30) as answer:
        return answer.read().decode()


def test_a_port_that_is_taken_is_no_error_and_everything_stays_on_loopback(client):
    link = urlsplit(client.dashboard_link)
    assert link.hostname == "127.0.0.1"
    assert link.port != 8787


def test_without_bokeh_the_page_says_what_to_install(client, monkeypatch):
    monkeypatch.setitem(sys.modules, PAGES, None)  # its import fails
    assert 'pip install "bokeh' in opened(client.dashboard_link)


class Status(RequestHandler):
    def get(self):
        self.write("made by bokeh")


def test_the_first_who_opens_it_gets_the_dashboard_and_unknown_pages_are_unknown(
    client, monkeypatch
):
    made = []

    def connect(pages, http_server, scheduler, prefix):
        made.append((http_server, scheduler, prefix))
        pages.add_application(Application([("/status", Status)]))

    monkeypatch.setitem(sys.modules, PAGES, SimpleNamespace(connect=connect))
    scheduler = client.cluster.scheduler
    before = len(scheduler.http_application.applications)
    for _ in range(2):
        assert opened(client.dashboard_link) == "made by bokeh"
    assert made == [(scheduler.http_server, scheduler, "/")]
    assert len(scheduler.http_application.applications) == before
    with pytest.raises(HTTPError, match="404"):
        opened(client.dashboard_link + "s")


@pytest.mark.skipif(find_spec("bokeh") is None, reason="bokeh is not installed")
def test_the_dashboard_is_dasks():
    with mc.start(workers=1, memory_limit="1GB") as client:
        assert "Dask Diagnostic UI" in opened(client.dashboard_link)
        assert "/individual-task-stream" in opened(
            client.dashboard_link.replace("status", "individual-plots.json")
        )


def test_without_a_dashboard_there_is_no_link_to_one():
    with (
        forked(),
        mc.start(workers=1, memory_limit="1GB", dashboard_address=None) as client,
    ):
        assert not client.dashboard_link
        assert client.submit(int, 7).result() == 7
