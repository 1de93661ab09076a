"""Headless Chromium, driven through a pipe (the DevTools protocol), without a driver."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Page:
    """A tab.

    Args:
        url: to open.
        folder: for the browser's files.

    Attributes:
        complaints: what the page has written to its console, and what it threw.
    """

    def __init__(self, url: str, folder: Path):
        assert CHROMIUM is not None
        (there, out), (into, here) = os.pipe(), os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (there, here)]
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = [CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={folder}", "--window-size=1100,750"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}', *command], pass_fds=high,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (there, here, *high):
            os.close(fd)
        self._out, self._into, self._number, self._read = out, into, 0, b""
        self.complaints: list[str] = []
        self._session = ""
        try:
            self._open(url)
        except BaseException:
            self.close()
            raise

    def _open(self, url: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._into)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Response of the browser to a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while True:
            while b"\0" not in self._read:
                assert select.select([self._into], [], [], max(0, end - time.monotonic()))[0], "the browser is silent"
                more = os.read(self._into, 1 << 20)
                assert more, "the browser has ended"
                self._read += more
            raw, self._read = self._read.split(b"\0", 1)
            found = json.loads(raw)
            advice = found.get("params", {}).get("entry", {}).get("level") == "verbose"
            if found.get("method") in COMPLAINTS and not advice:
                self.complaints.append(json.dumps(found["params"]))
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> None:
        """Waits for an expression to hold."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, (script, self.run("document.body?.innerText"))
            time.sleep(0.02)

    def say(self, text: str) -> None:
        """Writes a message and sends it."""
        self.run(f"document.getElementById('text').value = {json.dumps(text)}, document.getElementById('send').click()")

    def picture(self) -> bytes:
        """Screenshot as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
