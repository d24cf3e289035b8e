"""Dask's dashboard, made when somebody opens it: its import takes a second."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from tornado.web import Application, RequestHandler

MISSING = (
    "This page needs bokeh, which cannot be imported ({error}). "
    'Install it where the scheduler runs: pip install "bokeh>=3.1"\n'
)


class Unopened(Application):
    """Has the place of the dashboard in a scheduler's HTTP server until a page is asked for."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__([(r"/.*", _Open)])
        self.scheduler = scheduler
        self.one_by_one = asyncio.Lock()

    async def open(self) -> None:
        """Put the dashboard there; `ImportError` without bokeh, or with one that is too old."""
        pages = self.scheduler.http_application
        async with self.one_by_one:
            if self not in pages.applications:
                return
            # Beside the event loop, so that the scheduler goes on.
            dashboard = await asyncio.to_thread(import_module, "distributed.dashboard.scheduler")
            dashboard.connect(pages, self.scheduler.http_server, self.scheduler, prefix="/")
            pages.applications.remove(self)


class _Open(RequestHandler):
    application: Unopened

    async def get(self) -> None:
        try:
            await self.application.open()
        except ImportError as error:
            self.set_header("Content-Type", "text/plain")
            self.finish(MISSING.format(error=error))
        else:
            self.redirect(self.request.uri or "/")


def serve(scheduler: Any) -> None:
    """Have a scheduler of this process serve the dashboard at its HTTP address."""
    scheduler.http_application.add_application(Unopened(scheduler))


def unlink(cluster: Any) -> None:
    """Have clients of a cluster without a dashboard show no link to one."""
    services = cluster.scheduler.services
    services["http"] = services.pop("dashboard")  # which is served, and stopped, all the same
    cluster.scheduler_info.get("services", {}).pop("dashboard", None)


@contextmanager
def on_any_port() -> Iterator[None]:
    """Have Dask take another port where its own is taken, without a warning: the link names it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Port \d+ is already in use", UserWarning)
        yield
