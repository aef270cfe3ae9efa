"""The page of loads, in a real browser: it draws, reads nothing from anywhere, and runs nothing that the run wrote."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from foundry_moe.callbacks.expert_load import ExpertLoad
from foundry_moe.cli import main
from foundry_moe.loads.charts import Line, draw_chart
from tests.helpers.training import fit, mpt

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
EVIL = "dmoe/loss/</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
RED = (178, 24, 43)  # twice the mean and more: see colour() in page.js


def browse(page, profile, *arguments, fragment=""):
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={profile}", "--window-size=1200,1600", *arguments, f"{page.as_uri()}{fragment}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture
def page(tmp_path):
    """Of a run whose layer 5 sends ever more to expert 1, with a metric that is written to be executed."""
    lines = []
    for n in range(1, 7):
        loads = {"2": [8, 8, 8, 8], "5": [8 - n, 8 + 3 * n, 8 - n, 8 - n]}
        metrics = {EVIL: float(n), "dmoe/layer5/entropy": 1 - n / 8, "dmoe/layer2/entropy": 1.0}
        lines.append(json.dumps({"batch": 10 * n, "loads": loads, "metrics": metrics}))
    (tmp_path / "a&<b>.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(SystemExit) as stopped:
        main(["loads", str(tmp_path / "a&<b>.jsonl"), "--html", str(tmp_path / "page.html")])
    assert stopped.value.code == 0
    return tmp_path / "page.html"


@pytest.mark.quick
def test_it_is_one_file_and_what_the_run_wrote_is_text(page):
    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, dict(attrs)))

    text = page.read_text()
    Reader().feed(text)
    tags = [tag for tag, _ in seen]
    assert tags.count("script") == 2 and "img" not in tags and "link" not in tags and "b>" not in tags
    assert not [attrs for _, attrs in seen if {"src", "href", "onerror"} & set(attrs)] and "://" not in text
    assert (
        "a&amp;&lt;b&gt;.jsonl" in text
        and "Layer 5 collapses onto few experts: the entropy of its loads is 0.25" in text
    )


@pytest.mark.quick
def test_charts_of_hard_values_have_finite_coordinates():
    for values in ([None, None], [0.0, 0.0], [1e30, -1e30], [5.0, None], [1e-30, 2e-30], [7.0, 7.0]):
        drawn = draw_chart("t", "e", [3, 3 + 10**9], [Line(name="<n>", values=values)])
        assert "nan" not in drawn and "inf" not in drawn and "<n>" not in drawn
    assert draw_chart("t", "e", [1], [Line(name="n", values=[2.0])]).count("<circle") == 1


@pytest.mark.quick
def test_a_run_leaves_its_page_and_one_without_a_file_is_refused(tmp_path):
    paths = {"file": str(tmp_path / "load.jsonl"), "html": str(tmp_path / "deep" / "load.html")}
    fit(mpt(), callbacks=[ExpertLoad(**paths)], duration="2ba")
    text = (tmp_path / "deep" / "load.html").read_text()
    assert "Up to batch 2: 2 layers of 4 experts, 2 lines." in text and "Entropy of the router" in text
    assert len(re.findall("<polyline", text)) >= 10
    with pytest.raises(ValueError, match=r"expert_load.html \(x.html\) is a page of `file`: give file too"):
        ExpertLoad(html="x.html")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_browser_draws_both_heat_maps_and_runs_nothing_else(page, tmp_path):
    document = browse(page, tmp_path / "profile", "--dump-dom", fragment="#layer=1&when=6")
    assert 'id="layers"' in document and 'data-drawn="2x4"' in document, "layers by experts"
    assert 'data-drawn="4x6"' in document, "experts of a layer by points in time"
    assert "up to batch 60" in document and "<title>Expert load: a&amp;&lt;b&gt;.jsonl</title>" in document
    picture = tmp_path / "shot.png"
    browse(page, tmp_path / "profile", f"--screenshot={picture}", fragment="#layer=1&when=6")
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    red = (pixels == RED).all(-1)
    # the last point's fullest expert is above twice the mean: a cell of 48 x 26 in the first map, more in the second
    assert red.sum() > 2 * 40 * 20
    below = (pixels[..., 2] > 160) & (pixels[..., 0] < 140)
    assert below.sum() > 4 * 40 * 20, "blue: experts below the mean"
