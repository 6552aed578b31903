"""A headless Chromium driven through chromedriver's WebDriver interface (W3C Recommendation), without a client."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TIMEOUT_SECONDS = 120.0
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
IS_THERE = CHROMIUM is not None and CHROMEDRIVER is not None


class Browser:
    """A session of a browser."""

    def __init__(self, address: str):
        self._address = address
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-extensions",
        ]
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error

    def open(self, url: str) -> None:
        """Go to a page, and wait until it has drawn itself."""
        self._call("POST", f"{self._session}/url", {"url": url})
        self.wait("return document.body.dataset.ready === 'yes'")

    def wait(self, script: str) -> None:
        """Wait until a script returns true."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        """Evaluate the body of a function on the page."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": arguments})

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is; by their WebDriver code points."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def text(self, selector: str) -> str:
        """The text of the first element that a CSS selector finds."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def complaints(self) -> list[str]:
        """The console's log since the last call."""
        return [entry["message"] for entry in self._call("POST", f"{self._session}/se/log", {"type": "browser"})]

    def close(self) -> None:
        """End the session."""
        self._call("DELETE", self._session)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, ended with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert CHROMEDRIVER is not None
    driver = subprocess.Popen([CHROMEDRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + TIMEOUT_SECONDS
        while True:
            try:
                with urllib.request.urlopen(address + "/status", timeout=TIMEOUT_SECONDS):
                    break
            except OSError:
                assert time.monotonic() < end and driver.poll() is None, "chromedriver does not start"
                time.sleep(0.05)
        session = Browser(address)
        try:
            yield session
        finally:
            session.close()
    finally:
        driver.terminate()
        driver.wait(TIMEOUT_SECONDS)
