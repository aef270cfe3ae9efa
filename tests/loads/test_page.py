"""The page of loads: a verdict and heat maps in one file without scripts, in which text of the run is escaped."""

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
from tests.helpers.training import fit, mpt

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
EVIL = "dmoe/loss/</svg><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
RED, BLUE = (103, 0, 31), (5, 48, 97)  # the ends of matplotlib's RdBu_r: twice the mean and more, no token


def make_page(folder, name="loads.jsonl", metrics=lambda n: {}, collapses=True):
    """Of a run of six lines whose layer 5 sends ever more choices to expert 1, in the end all."""
    lines = []
    for n in range(1, 7):
        loads = {"2": [8, 8, 8, 8], "5": [6 - n, 8 + 3 * n, 6 - n, 6 - n] if collapses else [4, 9, 9, 4]}
        lines.append(json.dumps({"batch": 10 * n, "loads": loads, "metrics": metrics(n)}))
    (folder / name).write_text("\n".join(lines) + "\n")
    with pytest.raises(SystemExit) as stopped:
        main(["loads", str(folder / name), "--html", str(folder / "page.html")])
    assert stopped.value.code == 0
    return folder / "page.html"


@pytest.mark.quick
def test_the_page_is_one_file_without_scripts_and_text_of_the_run_is_escaped(tmp_path):
    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, dict(attrs)))

    text = make_page(tmp_path, "a&<b>.jsonl", lambda n: {EVIL: float(n)}).read_text()
    Reader().feed(text)
    tags = [tag for tag, _ in seen]
    assert tags.count("svg") == 2 and not {"script", "img", "link", "b>", "iframe", "object"} & set(tags)
    for _, attrs in seen:
        assert not {"src", "onerror", "onload"} & set(attrs)
        assert (attrs.get("href") or attrs.get("xlink:href") or "#").startswith(("#", "data:image/png;base64,"))
    assert set(re.findall(r"\w+://[\w.]+", text)) <= {"http://www.w3.org"}, "names of XML's vocabularies"
    assert "a&amp;&lt;b&gt;.jsonl" in text and EVIL not in text
    assert "Layer 5 collapses onto few experts: the entropy of its loads is 0.00" in text
    assert "every expert had tokens" not in text


@pytest.mark.quick
def test_the_verdict_counts_dropped_choices_and_needs_no_metric_for_loads(tmp_path):
    known = {"dmoe/layer2/dropped": 0.3}
    text = make_page(tmp_path, "x", lambda n: {**known, "dmoe/layer5/dropped": n / 10}, collapses=False).read_text()
    assert "Dropped choices: 32.5% over the run, 45.0% in the last line (layer 5: 60.0%)." in text
    assert "every expert had tokens" not in text
    text = make_page(tmp_path, metrics=lambda n: {"dmoe/layer2/dropped": 0.0}, collapses=False).read_text()
    assert "In the last line every expert had tokens, and no choice was dropped in the run." in text
    assert "In the last line every expert had tokens.<" in make_page(tmp_path, collapses=False).read_text()
    assert "Layer 5 collapses" in make_page(tmp_path).read_text()


@pytest.mark.quick
def test_a_run_leaves_its_page_and_one_without_a_file_is_refused(tmp_path):
    paths = {"file": str(tmp_path / "load.jsonl"), "html": str(tmp_path / "deep" / "load.html")}
    fit(mpt(), callbacks=[ExpertLoad(**paths)], duration="2ba")
    text = (tmp_path / "deep" / "load.html").read_text()
    assert "Up to batch 2: 2 layers of 4 experts, 2 lines." in text
    assert text.count("<svg") == 2 and text.count("data:image/png") >= 4, "two maps of layers, one over time a layer"
    with pytest.raises(ValueError, match=r"expert_load.html \(x.html\) is a page of `file`: give file too"):
        ExpertLoad(html="x.html")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_browser_draws_the_heat_maps_and_runs_nothing(tmp_path):
    page, picture = make_page(tmp_path), tmp_path / "shot.png"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1600",
    ]  # fmt: skip
    document = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "<title>Expert load: loads.jsonl</title>" in document
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120, check=True)
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    for colour in (RED, BLUE):  # cells of the last point, in both kinds of heat map
        assert (np.abs(pixels - colour).max(-1) <= 3).sum() > 40 * 20
