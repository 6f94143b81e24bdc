"""The page in a real browser, headless: it asks, streams, and colours each token by where it came from."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.tools.serving.serving import Served

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (Debian: the package chromium)")
def test_a_question_is_answered_in_colours(served: Served, tmp_path: Path) -> None:
    assert BROWSER is not None
    text = "Größe <b>&amp;</b> of dogs, dogs and dogs"
    command = [BROWSER, *QUIET.split(), f"--user-data-dir={tmp_path}", "--virtual-time-budget=8000"]
    url = f"{served.url}/#ask={quote(text)}"
    dom = subprocess.run([*command, url], check=True, capture_output=True, text=True, timeout=120).stdout
    assert 'data-state="done"' in dom, dom[-2000:]
    answer = re.findall(r'<div class="assistant">(.*?)</div>', dom, re.DOTALL)
    tokens = re.findall(r'<span class="(draft|own)">(.*?)</span>', answer[0], re.DOTALL)
    assert html.unescape("".join(text for _, text in tokens)) == text  # shown as text, whatever it holds
    assert {origin for origin, _ in tokens} == {"draft", "own"}
    (figures,) = re.findall(r'<div id="figures"[^>]*>(.*?)</div>', dom)
    assert re.fullmatch(r"[\d.]+ tokens/s · \d+ % of \d+ drafted tokens accepted · K \d+ · \d+ tokens", figures)
    assert 'class="error"' not in dom


def test_nothing_is_fetched_from_elsewhere(served: Served) -> None:
    page = served.client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    text = resources.files("specrt.tools.serving").joinpath("page.html").read_text(encoding="utf-8")
    assert page.text == text and not re.search(r"(src|href)\s*=|https?://|@import|url\(", text)
