"""A headless Chromium that shows a page from a file and tells what it made of it. Not a test.

It is driven over the DevTools protocol through a pipe (https://chromedevtools.github.io/devtools-protocol/), so that it
needs no driver and opens no port.
"""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)
PROBLEMS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Network.requestWillBeSent")


def installed() -> str | None:
    """The program, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One browser with one empty profile, to be used as a context. Every call waits for its answer.

    Args:
        profile: an empty folder.
    """

    def __init__(self, profile: Path) -> None:
        program = installed()
        assert program is not None, f"none of {', '.join(NAMES)} is installed; .ci/programs installs one"
        (read, self._write), (self._read, write) = os.pipe(), os.pipe()
        # The browser reads from descriptor 3 and writes to 4; a shell puts them there.
        command = f'exec "$@" 3<&{read} 4>&{write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *SWITCHES.split(), f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read)
        os.close(write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        (page,) = [target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def show(self, page: Path, *, width: int = 1280, height: int = 800, theme: str = "light") -> None:
        """Load a page anew at a width in CSS pixels, in a theme ("light", "dark"), and forget earlier events."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def evaluate(self, script: str) -> Any:
        """The value of an expression of JavaScript in the page; of a promise, what it comes to."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def problems(self) -> list[str]:
        """What the console holds, and whatever the page asked for besides itself."""
        found = [event for event in self.events if event["method"] in PROBLEMS]
        asked = [event for event in found if event["method"] == "Network.requestWillBeSent"]
        own = [event for event in asked if event["params"]["request"]["url"] == event["params"]["documentURL"]]
        return [json.dumps(event) for event in found if event not in own]

    def picture(self, target: Path, *, whole: bool = True) -> None:
        """Write what is shown as PNG: the page from top to bottom, or what fits on the screen."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        target.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command; its result.

        Raises:
            RuntimeError: if the browser refuses it, or has gone.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        """The next message; events are kept."""
        while b"\0" not in self._buffer:
            received = os.read(self._read, 1 << 16)
            if not received:
                raise RuntimeError("the browser has gone")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message
