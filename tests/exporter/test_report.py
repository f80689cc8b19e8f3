"""The report's page: what it says, that it needs nothing from elsewhere, and that a browser shows it whole on a desk and on a phone."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sinkring.exporter import write_report
from sinkring.exporter.report.charts import Line, line_chart, ring_drawing, ring_frames
from sinkring.runtime import RingGeometry
from sinkring.runtime.errors import InputError

from tests.exporter.invoke_cli import invoke

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RING = RingGeometry(2, 4, 6)


class Tags(HTMLParser):
    """Every tag is closed by its own; and all attributes."""

    VOID = frozenset({"meta", "line", "rect", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(speaking_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 80, encoding="utf-8")
    ended = invoke("report", speaking_bundle, "--out", folder / "report.html", "--steps", 60, "--text", text, "--bundles", folder, "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["passed"] is True
    return folder / "report.html"


def test_the_page_says_what_was_found(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for words in ("S=2 W=8", "agrees", "first wrap", "told apart", "decode (", "99th percentile", "recompute", "has no engines"):
        assert words in text, words
    sections = re.findall("<h2>(.*?)</h2>", text)
    assert sections == [
        "What was exported",
        "Which token is in which slot",
        "Against eager PyTorch",
        "Speed and memory",
        "Perplexity",
        "Engine plans",
    ]


def test_the_page_is_well_formed_and_asks_for_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    outward = [(tag, name, value) for tag, name, value in tags.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert outward == []
    assert not re.search(r"url\(|@import|<script|https?://", text)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_whole(page: Path, tmp_path: Path, width: int, scheme: str) -> None:
    """In a frame as wide as the screen: nothing runs out at its side, every drawing has a size, and ink and paper are far apart."""
    wrapper = tmp_path / "wrapper.html"
    # A string of JavaScript in HTML must not hold the end of a script.
    inside = json.dumps(page.read_text(encoding="utf-8")).replace("</", "<\\/")
    wrapper.write_text(
        f'<body><iframe id="f" style="width:{width}px;height:800px;border:0;color-scheme:{scheme}"></iframe><pre id="out"></pre><script>'
        "const frame = document.getElementById('f');"
        "frame.onload = () => { const d = frame.contentDocument; const root = d.documentElement; const style = getComputedStyle(d.body);"
        "const drawings = [...d.querySelectorAll('svg, .ring')].map(s => s.getBoundingClientRect());"
        "const wide = [...d.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && "
        "e.getBoundingClientRect().right > root.clientWidth + 1).map(e => e.outerHTML.slice(0, 80));"
        "document.getElementById('out').textContent = JSON.stringify({scroll: root.scrollWidth, client: root.clientWidth, wide,"
        "drawings: drawings.length, flat: drawings.filter(r => r.width < 200 || r.height < 20).length,"
        "ink: style.color, paper: style.backgroundColor}); };"
        f"frame.srcdoc = {inside};</script>",
        encoding="utf-8",
    )
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else ["--blink-settings=preferredColorScheme=1"]
    command += [*dark, "--virtual-time-budget=4000", "--dump-dom", wrapper.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    said = re.search(r'<pre id="out">(.*?)</pre>', shown, re.DOTALL)
    assert said, shown[-2000:]
    found = json.loads(said.group(1).replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert width - 20 <= found["client"] <= width, "but for a scroll bar"
    assert found["scroll"] <= found["client"], found["wide"]
    assert found["wide"] == []
    assert found["drawings"] == 6
    assert found["flat"] == 0
    ink, paper = (sum(map(int, re.findall(r"\d+", found[name])[:3])) / 3 for name in ("ink", "paper"))
    assert (paper > ink) == (scheme == "light")
    assert abs(ink - paper) > 150


def test_each_slot_is_drawn_with_its_token() -> None:
    drawing = ring_drawing(RING, 11)
    titles = re.findall('title="(.*?)"', drawing)
    assert titles == [
        f"slot {slot}: {'empty' if RING.token_at(slot, 11) is None else f'token {RING.token_at(slot, 11)}'}"
        for slot in range(RING.capacity)
    ]
    groups = re.findall('<span class="(.*?)"', drawing)
    seen = set(RING.attended(11))
    for slot, kind in enumerate(groups):
        token = RING.token_at(slot, 11)
        expected = "empty" if token is None else "sink" if slot < 2 else "window" if token in seen else "forgotten"
        assert kind.split()[0] == expected
        assert ("head" in kind) == (token == 11)
    assert {"sink", "window", "forgotten"} <= {kind.split()[0] for kind in groups}


@pytest.mark.parametrize(
    "geometry", [RING, RingGeometry(4, 256, 324), RingGeometry(0, 5, 8), RingGeometry.linear(12), RingGeometry(4, 4092, 4156)]
)
def test_frames_of_every_geometry_can_be_drawn(geometry: RingGeometry) -> None:
    for _, position in ring_frames(geometry):
        drawing = ring_drawing(geometry, position)
        assert drawing.count("head") == 1
        assert drawing.count("<span") <= 70


def test_a_chart_leaves_out_what_is_not_finite() -> None:
    chart = line_chart([Line("a", [(0, 1), (1, float("nan")), (2, 3)])], "x", "y <z>")
    (points,) = re.findall('points="(.*?)"', chart)
    assert len(points.split()) == 2
    assert "y &lt;z&gt;" in chart
    assert "nothing was measured" in line_chart([Line("a", [])], "x", "y")


def test_an_out_that_is_no_file_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give the path of an HTML file"):
        write_report(tmp_path / "nothing", tmp_path)
