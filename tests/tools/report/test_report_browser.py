"""The report in a real browser, headless: light and dark as the reader's system is, and no wider than the window."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from specrt.engines.interface import Array
from specrt.tools.bench.records import Bench
from specrt.tools.report.report import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (Debian: the package chromium)")
QUIET = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking"
PROBE = """<script>document.title = ["probe", document.documentElement.scrollWidth, window.innerWidth,
performance.getEntriesByType("resource").length].join(" ")</script></body>"""

TABLE_PROBE = """<script>const first = document.querySelector(".scroll");
document.title = ["probe", first.scrollWidth, first.clientWidth].join(" ")</script></body>"""
REPORTS = Path(__file__).parents[3] / "docs" / "reports"


def browse(page: Path, profile: Path, *options: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, *QUIET.split(), f"--user-data-dir={profile}", *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.fixture
def page(benched: Bench, tmp_path: Path) -> Path:
    path = write_report(benched, tmp_path / "r.html")[0]
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</body>", PROBE), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1200, 600])
def test_the_page_fits_the_window_and_fetches_nothing(page: Path, tmp_path: Path, width: int) -> None:
    html = browse(page, tmp_path / "profile", f"--window-size={width},900", "--dump-dom")
    found = re.search(r"<title>probe (\d+) (\d+) (\d+)</title>", html)
    assert found is not None
    needed, inner, fetched = map(int, found.groups())
    assert needed <= inner and fetched == 0


@pytest.mark.parametrize("name", ["qwen-pair", "smollm2", "smollm2-ngram"])
def test_the_first_table_of_a_report_in_the_repository_fits(name: str, tmp_path: Path) -> None:
    """At 1,000 pixels it does not scroll; at 300 it does, which is the control."""
    text = (REPORTS / f"{name}.html").read_text(encoding="utf-8")
    assert text.index("<svg") < text.index("<table")
    copy = tmp_path / "r.html"
    copy.write_text(text.replace("</body>", TABLE_PROBE), encoding="utf-8")
    widths = []
    for width in (1000, 300):
        html = browse(copy, tmp_path / "profile", f"--window-size={width},900", "--dump-dom")
        found = re.search(r"<title>probe (\d+) (\d+)</title>", html)
        assert found is not None
        widths.append(tuple(map(int, found.groups())))
    assert widths[0][0] <= widths[0][1] and widths[1][0] > widths[1][1]


def test_it_is_light_or_dark_as_the_system_is(page: Path, tmp_path: Path) -> None:
    light, dark = (screenshot(page, tmp_path, scheme) for scheme in (1, 0))
    assert light[2:20, 2:20].mean() > 0.9 and dark[2:20, 2:20].mean() < 0.2  # the margin
    assert min(np.ptp(shot.mean(axis=-1)) for shot in (light, dark)) > 0.5  # what is written stands out from it


def screenshot(page: Path, folder: Path, scheme: int) -> Array:
    """[height, width, 3], 0 to 1; ``scheme`` is Chromium's preferred colour scheme, 0 dark and 1 light."""
    from matplotlib import image

    file = folder / f"{scheme}.png"
    options = (f"--screenshot={file}", "--window-size=900,1200", f"--blink-settings=preferredColorScheme={scheme}")
    browse(page, folder / f"profile{scheme}", *options)
    pixels: Array = np.asarray(image.imread(file))[..., :3]
    return pixels
