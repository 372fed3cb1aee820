"""A page in a real browser, and what went wrong on it."""

import os
import time
from typing import Any

SHOTS = os.environ.get("SPECSOT_SHOTS")  # a folder where screenshots are kept


class Visit:
    """A page that was opened, and what went wrong on it."""

    def __init__(self, browser: Any, url: str, width: int, height: int, scheme: str) -> None:
        size = {"width": width, "height": height}
        self.page = browser.new_page(viewport=size, color_scheme=scheme)
        self.faults: list[str] = []
        self.strangers: list[str] = []
        self.page.on(
            "console",
            lambda one: self.faults.append(one.text) if one.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda one: self.faults.append(str(one)))
        self.page.on(
            "request",
            lambda one: (
                self.strangers.append(one.url) if not one.url.startswith((url, "data:")) else None
            ),
        )
        self.page.goto(url)

    def shot(self, name: str) -> None:
        if SHOTS:
            self.page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)

    def until(self, script: str, wait: float = 20.0) -> None:
        """Wait until this is true on the page."""
        end = time.monotonic() + wait
        while not self.page.evaluate(script):
            assert time.monotonic() < end, f"{script}: {self.faults}"
            time.sleep(0.05)

    def wide(self) -> bool:
        """Whether the page is wider than the window."""
        return bool(
            self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth + 1")
        )

    def clean(self) -> None:
        assert self.faults == [] and self.strangers == [] and not self.wide()
        try:
            from axe_playwright_python.sync_playwright import Axe
        except ImportError:
            return
        found = Axe().run(self.page).response["violations"]
        serious = [one["id"] for one in found if one["impact"] in ("serious", "critical")]
        assert serious == [], found
