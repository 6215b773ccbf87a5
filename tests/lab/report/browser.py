"""The installed Chromium, driven by Playwright: a page, its console messages and its requests."""

from __future__ import annotations

import os
import shutil
from types import TracebackType
from typing import Any

from playwright.sync_api import BrowserContext, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find() -> str | None:
    """Return the browser named in CHROMIUM, else the first one that is installed."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """A running browser with at most one page."""

    page: Page

    def __init__(self, program: str) -> None:
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=program, args=_FLAGS)
        self._context: BrowserContext | None = None

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._browser.close()
        self._playwright.stop()

    def open(
        self, url: str, *, width: int, height: int, dark: bool = False, phone: bool = False
    ) -> None:
        """Load a page with a window size and a colour scheme; clears messages and requests."""
        if self._context:
            self._context.close()
        self._context = self._browser.new_context(
            viewport={"width": width, "height": height},
            device_scale_factor=2 if phone else 1,
            is_mobile=phone,
            has_touch=phone,
            color_scheme="dark" if dark else "light",
        )
        self.page = self._context.new_page()
        self.page.set_default_timeout(60_000)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.dialogs = 0
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("console", self._add_message)
        self.page.on("dialog", self._dismiss)
        self.page.goto(url)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self.page.evaluate(expression)

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def texts(self, selector: str) -> list[str]:
        return list(
            self.page.locator(selector).evaluate_all(
                "nodes => nodes.map(node => node.innerText ?? node.textContent)"
            )
        )

    def hover(self, selector: str, index: int = 0) -> None:
        self.page.mouse.move(*self._centre(selector, index))

    def click(self, selector: str, index: int = 0) -> None:
        self.page.mouse.click(*self._centre(selector, index))

    def tap(self, selector: str, index: int = 0) -> None:
        self.page.touchscreen.tap(*self._centre(selector, index))

    def key(self, name: str) -> None:
        """Press and release a key, such as "Tab" or "ArrowRight"."""
        self.page.keyboard.press(name)

    def problems(self) -> list[str]:
        """Return the errors and warnings of the page so far."""
        self.run("new Promise(requestAnimationFrame)")  # let pending events arrive
        return self.messages

    def _centre(self, selector: str, index: int) -> tuple[float, float]:
        """Scroll an element into view and return its centre."""
        x, y = (
            self.page.locator(selector)
            .nth(index)
            .evaluate(
                "node => { node.scrollIntoView({block: 'center', behavior: 'instant'});"
                "const box = node.getBoundingClientRect();"
                "return [box.x + box.width / 2, box.y + box.height / 2]; }"
            )
        )
        return x, y

    def _add_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.messages.append(message.text)

    def _dismiss(self, dialog: Any) -> None:
        self.dialogs += 1
        dialog.dismiss()
