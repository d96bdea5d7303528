#!/usr/bin/env python3
"""Screenshots of a run's report in a browser: the two of the README, or the whole page at two widths.

    scripts/screenshots.py RUN OUTDIR          report-light.png and report-dark.png
    scripts/screenshots.py RUN OUTDIR --all    the whole page, 1280 and 390 pixels wide, light and dark

Needs selenium, Chromium and its driver (Debian packages chromium and chromium-driver). Exits with 1 if the browser
logs anything, or if something is wider than the window.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

os.environ["SE_OFFLINE"] = "true"  # selenium never downloads a driver
DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURE = """
const svgs = [...document.querySelectorAll('svg')], page = document.documentElement;
return {wide: page.scrollWidth, tall: page.scrollHeight, window: page.clientWidth,
        titles: svgs.map(s => s.querySelector('title').textContent),
        empty: svgs.filter(s => s.getBoundingClientRect().height < 8).length,
        small: Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)),
        background: getComputedStyle(document.body).backgroundColor}
"""


class Browser(Chrome):
    """Headless Chromium through its driver, both as installed; it contacts no server."""

    def __init__(self) -> None:
        if not (DRIVER and CHROMIUM):
            raise OSError("chromium or chromedriver is not installed: apt-get install chromium chromium-driver")
        options = ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (
            *("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"),
            *("disable-background-networking", "disable-component-update", "no-first-run"),
        ):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        super().__init__(options, ChromeService(executable_path=DRIVER))

    def show(self, page: Path, width: int, dark: bool = False) -> dict[str, Any]:
        """Open a file in a window of this width (a phone's, below 600 pixels); returns the values of MEASURE."""
        phone = width < 600
        size = {"width": width, "height": 900, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.get(page.resolve().as_uri())
        measured: dict[str, Any] = self.execute_script(MEASURE)
        return measured

    def logged(self) -> list[str]:
        """Console messages since the last call: errors, refused loads."""
        return [entry["message"] for entry in self.get_log("browser")]

    def picture(self, file: Path, top: float, height: float, width: int) -> None:
        clip = {"x": 0, "y": max(top, 0), "width": width, "height": height, "scale": 1}
        values = {"captureBeyondViewport": True, "clip": clip}
        file.write_bytes(base64.b64decode(self.execute_cdp_cmd("Page.captureScreenshot", values)["data"]))
        print(f"{file}: {file.stat().st_size / 1024:.0f} KiB")

    def top_of(self, name: str) -> float:
        return float(self.execute_script(f"return document.getElementById('{name}').getBoundingClientRect().top"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    from edgeft.report.render import write_report
    from edgeft.run.folder import Run

    args.out.mkdir(parents=True, exist_ok=True)
    page = write_report(Run.open(args.run))
    wrong = []
    with Browser() as browser:
        for width in (1280, 390) if args.all else ():
            for scheme in ("light", "dark"):
                measured = browser.show(page, width, scheme == "dark")
                browser.picture(args.out / f"{width}-{scheme}.png", 0, measured["tall"], width)
                if measured["wide"] > measured["window"]:
                    wrong.append(f"{width} pixels: the page is {measured['wide']} wide")
        if not args.all:
            browser.show(page, 1180)
            browser.picture(args.out / "report-light.png", 0, browser.top_of("answers") + 620, 1180)
            browser.show(page, 1180, dark=True)
            top = browser.top_of("course") - 40
            browser.picture(args.out / "report-dark.png", top, browser.top_of("use") - top, 1180)
        wrong += browser.logged()
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
