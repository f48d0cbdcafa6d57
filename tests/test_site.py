"""The site that ``make docs`` has built: every link leads somewhere, and browsers show every page."""

from __future__ import annotations

import contextlib
import functools
import http.server
import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import networkx as nx
import pytest

from tests.support.browser import WIDTHS, Browser, find_browser

SITE = Path(__file__).parent.parent / "build" / "site"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="make docs has not built the site"),
]

#: What newcomers ask, and the heading under which the site answers.
ANSWERS = {
    "How do I push a trainer's weights to an engine?": "weights.html#a-trainer-and-an-engine",
    "How do I receive into fused projections, with layouts of my own?": (
        "weights-by-mover.html#fused-projections-few-heads-of-keys-and-experts"
    ),
    "How do I say which part of q, k and v a rank holds?": "weights-shards.html#a-fused-projection-on-two-ranks",
    "How do experts go from EP to TP?": "weights-shards.html#experts",
    "How do quantized weights take their scales along?": "weights-by-mover.html#quantized-weights-with-their-scales",
    "How do I describe the network of my cluster?": "concepts.html#topology",
    "What does a transfer of my model cost?": "plan-models.html",
    "How do I draw a plan?": "concepts.html#plan",
    "How does a search choose stages?": "strategy-search.html#from-a-model-to-a-training-plan",
    "Why is my profile noisy?": "strategy-search.html#read-the-result",
    "What does this error mean?": "errors.html",
    "How do I continue on fewer ranks?": "elastic.html#train-on-4-then-3-then-6-ranks",
    "Can torchrun shrink a job?": "elastic.html#what-torchrun-cannot-do",
    "What do other systems do?": "weights-comparison.html",
    "How do I test a change of one line?": "contributing.html#change-one-line-and-test-it",
    "Where do I add a strategy?": "contributing.html#add-a-strategy",
}


class _Page(HTMLParser):
    """The ids of a page, the links of all of it, and the links of its article, without the navigation."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.article_links, self._is_article = {""}, [], [], False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self._is_article |= tag == "article"
        self.ids |= {values[key] for key in ("id", "name") if values.get(key)}
        for target in filter(None, (values.get("href"), values.get("src"))):
            self.links.append(target)
            if self._is_article:
                self.article_links.append(target)

    def handle_endtag(self, tag):
        self._is_article &= tag != "article"


@functools.cache
def _pages():
    """``{path inside the site: page}``; the page of errors of the server has absolute links, and is left out."""
    paths = (path for path in SITE.rglob("*.html") if path.name != "404.html")
    return {path.relative_to(SITE).as_posix(): _Page(path) for path in paths}


def _resolve(page, link):
    """The file and the anchor of a link inside the site, or None for a link to elsewhere."""
    if re.match(r"[a-z]+:", link):
        return None
    target, anchor = urldefrag(urljoin(page, link))
    return unquote(target), unquote(anchor)


def test_every_link_leads_to_a_file_and_a_heading():
    lost = []
    for name, page in _pages().items():
        for link in page.links:
            resolved = _resolve(name, link)
            if resolved is None:
                continue
            target, anchor = resolved
            other = _pages().get(target)
            is_there = (SITE / target).exists() if other is None else anchor in other.ids
            if not is_there:
                lost.append(f"{name}: {link}")
    assert not lost


def test_every_question_has_its_answer_within_four_clicks():
    clicks = nx.DiGraph()
    for name, page in _pages().items():
        targets = (_resolve(name, link) for link in page.article_links)
        clicks.add_edges_from((name, target[0]) for target in targets if target is not None)
    lengths = nx.single_source_shortest_path_length(clicks, "index.html")
    for question, answer in ANSWERS.items():
        target, anchor = urldefrag(answer)
        assert lengths.get(target, 99) <= 4, question
        assert anchor in _pages()[target].ids, question
    assert {name for name in _pages() if lengths.get(name, 99) > 4} == set()


@contextlib.contextmanager
def _served():
    """The address of the site on this machine."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(SITE))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.nightly
@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium or Chrome to show pages in")
def test_browsers_show_every_page_at_every_width():
    with _served() as address, Browser(find_browser()) as browser:
        for number, name in enumerate(_pages()):
            faults = browser.open(address + name, WIDTHS[0], is_dark=number % 2 == 0)
            for width in WIDTHS[1:]:
                faults += browser.resize(width)
            assert faults == [], name
            scheme = browser.evaluate("document.body.getAttribute('data-md-color-scheme')")
            assert scheme == ("default", "slate")[number % 2 == 0], name
