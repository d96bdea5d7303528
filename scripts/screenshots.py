#!/usr/bin/env python3
"""Pictures of a run's report, as a browser shows it: the two of the README, or the whole page in all its forms.

    scripts/screenshots.py RUN OUTDIR          report-light.png and report-dark.png
    scripts/screenshots.py RUN OUTDIR --all    the whole page, 1280 and 390 pixels wide, light and dark

Needs Chromium and its driver (Debian packages chromium and chromium-driver). It exits with 1 if the browser logged
anything, or if something is wider than the window.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

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


class Browser:
    """Headless Chromium, spoken to through its driver (the WebDriver protocol is plain HTTP)."""

    def __init__(self) -> None:
        if not (DRIVER and CHROMIUM):
            raise OSError("there is no chromium with its driver: apt-get install chromium chromium-driver")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.root = f"http://127.0.0.1:{found.getsockname()[1]}"
        self.profile = tempfile.TemporaryDirectory()
        port = self.root.rsplit(":", 1)[1]
        self.process = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._wait()
            args = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
            options = {"args": [*args, f"--user-data-dir={self.profile.name}"], "binary": CHROMIUM}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
            self.session = f"/session/{made['sessionId']}"
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(self.root + self.session, method="DELETE"), timeout=30)
        finally:
            self._end()

    def show(self, page: Path, width: int, dark: bool = False, height: int = 900) -> dict[str, Any]:
        """Open a file in a window of this width, as a phone would up to 600 pixels; what MEASURE finds."""
        scale = 2 if width < 600 else 1
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.tell("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._post(f"{self.session}/url", {"url": page.resolve().as_uri()})
        found: dict[str, Any] = self.run(MEASURE)
        return found

    def run(self, script: str) -> Any:
        return self._post(f"{self.session}/execute/sync", {"script": script, "args": []})

    def tell(self, command: str, values: dict[str, Any]) -> Any:
        """A command of Chromium's own DevTools."""
        return self._post(f"{self.session}/goog/cdp/execute", {"cmd": command, "params": values})

    def logged(self) -> list[str]:
        """What the page wrote to the console since the last call: errors, refused loads."""
        return [entry["message"] for entry in self._post(f"{self.session}/se/log", {"type": "browser"})]

    def picture(self, place: Path, top: float, height: float, width: int) -> None:
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        found = self.tell("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        place.write_bytes(base64.b64decode(found["data"]))

    def _wait(self) -> None:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{self.root}/status", timeout=5)
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise OSError("chromedriver does not answer")

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        asked = urllib.request.Request(
            self.root + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise OSError(json.loads(error.read())["value"]["message"]) from None

    def _end(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        shutil.rmtree(self.profile.name, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    from edgeft.report import write_report
    from edgeft.run.folder import Run

    args.out.mkdir(parents=True, exist_ok=True)
    page = write_report(Run.open(args.run))
    wrong = []
    with Browser() as browser:

        def top_of(name: str) -> float:
            return float(browser.run(f"return document.getElementById('{name}').getBoundingClientRect().top"))

        def take(name: str, top: float, height: float, width: int) -> None:
            place = args.out / f"{name}.png"
            browser.picture(place, max(top, 0), height, width)
            print(f"{place}: {place.stat().st_size / 1024:.0f} KiB")

        if args.all:
            for width in (1280, 390):
                for dark in (False, True):
                    found = browser.show(page, width, dark)
                    take(f"{width}-{'dark' if dark else 'light'}", 0, found["tall"], width)
                    if found["wide"] > found["window"]:
                        wrong.append(f"{width} pixels: the page is {found['wide']} wide")
        else:
            browser.show(page, 1180)
            take("report-light", 0, top_of("answers") + 620, 1180)
            browser.show(page, 1180, dark=True)
            take("report-dark", top_of("course") - 40, top_of("use") - top_of("course") + 40, 1180)
        wrong += browser.logged()
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
