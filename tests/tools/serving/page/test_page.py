"""The page in a real browser, headless: it sends a prompt, streams, and colours each token by its source."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.tools.serving.page.browser import BROWSER, opened
from tests.tools.serving.serving import Served, wait_until

SPANS = "[...document.querySelectorAll('.assistant span')].map(span => [span.className, span.textContent])"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (Debian: the package chromium)")
def test_a_question_is_answered_in_colours(served: Served, tmp_path: Path) -> None:
    text = "Größe <b>&amp;</b> of dogs, dogs and dogs"
    with opened(f"{served.url}/#ask={quote(text)}", tmp_path) as page:
        wait_until(lambda: page.evaluate("document.body.dataset.state") == "done", 60)
        tokens = page.evaluate(SPANS)
        assert "".join(shown for _, shown in tokens) == text  # as text, whatever it holds
        assert {origin for origin, _ in tokens} == {"draft", "own"}
        figures = page.evaluate("document.getElementById('figures').textContent")
        assert re.fullmatch(r"[\d.]+ tokens/s · \d+ % of \d+ drafted tokens accepted · K \d+ · \d+ tokens", figures)
        assert page.evaluate("document.querySelectorAll('.error').length") == 0
        assert page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)") == [
            f"{served.url}/v1/chat/completions"
        ]


def test_nothing_is_fetched_from_elsewhere(served: Served) -> None:
    page = served.client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    text = resources.files("specrt.serving").joinpath("page.html").read_text(encoding="utf-8")
    assert page.text == text and not re.search(r"(src|href)\s*=|https?://|@import|url\(", text)
