"""A headless Chromium, driven through its DevTools protocol over a pipe: no package needed.

The browser reads commands from file descriptor 3 and writes answers and events to 4, each a JSON
object that ends with a NUL.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_PATIENCE = 60  # seconds for one answer; the machine may be busy


def find() -> str | None:
    """The browser to use: what CHROMIUM names, else the first that is installed."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """A running browser with one page in it.

    Args:
        program: its path.
        profile: a new, empty folder for what it keeps.
    """

    def __init__(self, program: str, profile: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._buffer, self._count, self._session = b"", 0, ""
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser wants its ends as 3 and 4; these may be taken here, so a shell moves them.
        moved = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "-", program, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come before it are kept."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") != self._count:
                self.events.append(message)
            elif "error" in message:
                raise RuntimeError(f"{method}: {message['error']}")
            else:
                return dict(message["result"])

    def wait_for(self, event: str) -> dict[str, Any]:
        """The parameters of an event that has come, or comes next."""
        while True:
            for message in self.events:
                if message.get("method") == event:
                    self.events.remove(message)
                    return dict(message["params"])
            self.events.append(self._receive())

    def open(
        self, url: str, *, width: int, height: int, dark: bool = False, phone: bool = False
    ) -> None:
        """Load a page at a size, in a scheme of colours; forgets earlier events."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.scheme("dark" if dark else "light")
        self.events.clear()
        self.send("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def scheme(self, name: str) -> None:
        """What the reader prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return int(self.run(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def texts(self, selector: str) -> list[str]:
        """What elements say."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.run(f"{found}.map(node => node.innerText ?? node.textContent)"))

    def middle(self, selector: str, place: int = 0) -> tuple[float, float]:
        """The middle of an element in the window, after it was scrolled into view."""
        x, y = self.run(
            f"(() => {{ const node = document.querySelectorAll({json.dumps(selector)})[{place}];"
            "node.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = node.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return x, y

    def hover(self, selector: str, place: int = 0) -> None:
        self._mouse("mouseMoved", *self.middle(selector, place))

    def click(self, selector: str, place: int = 0) -> None:
        at = self.middle(selector, place)
        self._mouse("mouseMoved", *at)
        self._mouse("mousePressed", *at, button="left", clickCount=1)
        self._mouse("mouseReleased", *at, button="left", clickCount=1)

    def tap(self, selector: str, place: int = 0) -> None:
        x, y = self.middle(selector, place)
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, name: str) -> None:
        """Press and release a key, such as "Tab" or "ArrowRight"."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}[name]
        for kind in ("rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code
            )

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        image = self.send(
            "Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole)
        )
        path.write_bytes(base64.b64decode(image["data"]))

    def problems(self) -> list[str]:
        """What the page complained about: errors in the console, and exceptions."""
        self.run("new Promise(requestAnimationFrame)")  # whatever was about to happen has
        found = []
        for message in self.events:
            kind, given = message.get("method"), message.get("params", {})
            if kind == "Runtime.exceptionThrown":
                found.append(str(given["exceptionDetails"]))
            elif kind == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
                found.append(str(given["args"]))
            elif kind == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
                found.append(given["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        return [
            message["params"]["request"]["url"]
            for message in self.events
            if message.get("method") == "Network.requestWillBeSent"
        ]

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "scale": 1, **{k: size[k] for k in ("width", "height")}}}

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError("the browser does not answer" if not ready else "it has ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))
