"""Load every page of the documentation site in headless Chromium, and name those that fail.

    python .ci/docs_check.py build/site

A page fails if it writes an error to the console, asks for a file that is missing or lies on
another host, or is wider than a phone of 390 pixels. The search must find words of three pages.
Chromium is driven over its DevTools protocol, with tornado's websocket.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

#: Pixels of a phone's screen.
WIDTH, HEIGHT = 390, 844
#: Words to search for, and the end of the address that must be among the results.
SEARCHES = {
    "matmul": "docs/reference/multimm.html",
    "eigenvectors": "docs/notebooks/xarray-eofs.html",
    "certificate": "cluster/tls/README.html",
}
#: Pages that are loaded at the same time; arbitrary.
TABS = 4
SECONDS = 60
#: What is wider than the page, where something is.
WIDER = """((width) => {
  if (document.documentElement.scrollWidth <= width) return "";
  const wide = [...document.body.querySelectorAll("*")].filter(
    (one) => one.getBoundingClientRect().right > width + 1);
  const last = wide[wide.length - 1];
  return `${document.documentElement.scrollWidth} pixels wide` +
    (last ? `: <${last.tagName.toLowerCase()} class="${last.className}">` : "");
})"""
FOUND = 'JSON.stringify([...document.querySelectorAll("#search-results li a")].map((a) => a.href))'


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class Browser:
    """One connection to Chromium, for all tabs: answers by number, events by tab."""

    def __init__(self, link: WebSocketClientConnection) -> None:
        self.link, self.count = link, 0
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.events: dict[str, asyncio.Queue[Any]] = {}

    async def listen(self) -> None:
        while (text := await self.link.read_message()) is not None:
            said = json.loads(text)
            if "id" in said:
                self.answers.pop(said["id"]).set_result(said)
            elif said.get("sessionId") in self.events:
                self.events[said["sessionId"]].put_nowait(said)
        for answer in self.answers.values():
            answer.set_exception(ConnectionError("Chromium has ended"))

    async def ask(self, method: str, tab: str | None = None, **params: Any) -> Any:
        self.count += 1
        answer = self.answers[self.count] = asyncio.get_running_loop().create_future()
        request = {"id": self.count, "method": method, "params": params}
        await self.link.write_message(json.dumps(request | ({"sessionId": tab} if tab else {})))
        said = await asyncio.wait_for(answer, SECONDS)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        return said["result"]

    async def open_tab(self) -> str:
        target = await self.ask("Target.createTarget", url="about:blank")
        found = await self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = str(found["sessionId"])
        self.events[tab] = asyncio.Queue()
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.ask(f"{domain}.enable", tab)
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            tab, width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=True,
        )  # fmt: skip
        return tab

    async def evaluate(self, tab: str, code: str) -> Any:
        found = await self.ask("Runtime.evaluate", tab, expression=code, returnByValue=True)
        return found["result"].get("value")

    async def load(self, tab: str, url: str, origin: str) -> list[str]:
        """What is wrong with a page once it has loaded."""
        events = self.events[tab]
        while not events.empty():
            events.get_nowait()
        wrong = []
        await self.ask("Page.navigate", tab, url=url)
        while True:
            event = await asyncio.wait_for(events.get(), SECONDS)
            wrong += complaint(event, origin)
            if event["method"] == "Page.loadEventFired":
                break
        await asyncio.sleep(0.05)  # for scripts that run right behind
        while not events.empty():
            wrong += complaint(events.get_nowait(), origin)
        return wrong


def complaint(event: Any, origin: str) -> list[str]:
    given = event["params"]
    match event["method"]:
        case "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            return [details.get("exception", {}).get("description") or details["text"]]
        case "Runtime.consoleAPICalled" if given["type"] in ("error", "assert"):
            return ["console: " + " ".join(str(a.get("value", a)) for a in given["args"])]
        case "Log.entryAdded" if given["entry"]["level"] == "error":
            return [f"{given['entry']['text']} {given['entry'].get('url', '')}".strip()]
        case "Network.requestWillBeSent":
            url = given["request"]["url"]
            if not url.startswith((origin, "data:", "about:", "blob:")):
                return [f"asks for {url}: pages load nothing from other hosts"]
    return []


async def check(link: str, site: Path, origin: str) -> list[str]:
    browser = Browser(await websocket_connect(link, max_message_size=2**28))
    listening = asyncio.create_task(browser.listen())
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    pages = [page for page in pages if not page.startswith("_")]
    left, failed = list(pages), []

    async def work() -> None:
        tab = await browser.open_tab()
        while left:
            page = left.pop()
            try:
                wrong = await browser.load(tab, f"{origin}/{page}", origin)
                if wider := await browser.evaluate(tab, f"{WIDER}({WIDTH})"):
                    wrong.append(wider)
            except TimeoutError:
                wrong = [f"has not loaded within {SECONDS} s"]
            failed.extend(f"{page}: {one}" for one in dict.fromkeys(wrong))

    await asyncio.gather(*(work() for _ in range(TABS)))
    tab = await browser.open_tab()
    for word, page in SEARCHES.items():
        failed += await search(browser, tab, origin, word, page)
    print(f"{len(pages)} pages loaded, {len(SEARCHES)} words searched for")
    listening.cancel()
    return sorted(failed)


async def search(browser: Browser, tab: str, origin: str, word: str, page: str) -> list[str]:
    wrong = await browser.load(tab, f"{origin}/search.html?q={word}", origin)
    found: list[str] = []
    for _ in range(100):
        found = json.loads(await browser.evaluate(tab, FOUND))
        if any(url.partition("?")[0].partition("#")[0].endswith(page) for url in found):
            break
        await asyncio.sleep(0.1)
    else:
        wrong.append(f"{word!r} does not lead to {page}, but to {found[:5]}")
    return [f"search.html: {one}" for one in wrong]


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("no chromium: install Debian's package of that name", file=sys.stderr)
        return 2
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
        )  # fmt: skip
        process = subprocess.Popen(
            [chromium, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            link = address(process, Path(profile) / "DevToolsActivePort")
            failed = asyncio.run(check(link, site, f"http://127.0.0.1:{server.server_port}"))
        finally:
            process.terminate()
            process.wait()
            server.shutdown()
    for one in failed:
        print(one, file=sys.stderr)
    return bool(failed)


def address(process: subprocess.Popen[bytes], file: Path) -> str:
    """Where Chromium listens: it writes port and path down once it does."""
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"chromium ended with exit code {process.returncode}")
        if file.exists() and len(lines := file.read_text().split()) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise SystemExit("chromium does not listen")


if __name__ == "__main__":
    sys.exit(main())
