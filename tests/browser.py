"""A headless Chromium, driven over a pair of pipes, and what it says about a page."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
#: Seconds within which a page has loaded and any answer has come.
PATIENCE = 60
_COMPLAINTS = (
    "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded",
    "Network.loadingFailed",
)  # fmt: skip


class Page(NamedTuple):
    """A page that was loaded."""

    complaints: list[dict[str, Any]]  #: messages on the console, errors, what failed to load
    requests: list[str]  #: addresses that were asked for, data URIs left out
    found: Any  #: what the script returned


def program() -> str | None:
    """Return the path of the first browser that is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """Chromium until `close`; its protocol is one JSON text after the other, each ended by NUL."""

    def __init__(self, path: str, profile: Path, width: int = 1280) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", path,
             # Containers run it as root and give it little shared memory.
             "--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
             f"--user-data-dir={profile}", f"--window-size={width},900",
             "--remote-debugging-pipe"],
            pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)  # it ends when nobody can talk to it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def load(self, address: str, script: str) -> Page:
        """Load a page, run a script in it, and return what the browser said meanwhile."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable", session)
        self._ask("Page.navigate", session, url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read(time.monotonic() + PATIENCE)
        told = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self._ask("Runtime.evaluate", session, **told)
        self._ask("Target.closeTarget", targetId=target)
        requests = [
            event["params"]["request"]["url"]
            for event in self._events if event["method"] == "Network.requestWillBeSent"
        ]  # fmt: skip
        return Page(
            [event for event in self._events if event["method"] in _COMPLAINTS],
            [url for url in requests if not url.startswith("data:")],
            answer["result"].get("value"),
        )

    def _ask(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while (answer := self._read(deadline)).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self, deadline: float) -> dict[str, Any]:
        """Return the next message; events are kept."""
        while b"\0" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._in], [], [], left)[0]:
                raise TimeoutError(f"the browser said nothing for {PATIENCE} s")
            if not (more := os.read(self._in, 1 << 20)):
                raise EOFError(f"the browser ended with {self._process.wait()}")
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message
