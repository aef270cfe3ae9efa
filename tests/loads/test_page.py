"""The page of loads: a verdict, curves and heat maps in one file that loads nothing, with text of the run escaped."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from foundry_moe.callbacks.expert_load import ExpertLoad
from foundry_moe.cli import main
from foundry_moe.loads.page import _over_time
from tests.helpers.training import fit, mpt

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
EVIL = "dmoe/loss/</svg><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
RED, BLUE = (103, 0, 31), (5, 48, 97)  # the ends of the palette: twice the mean and more, no token
# points at two figures and shows their tooltips as text, which Bokeh keeps in shadow roots
HOVER = """<script>
function all(root, found) {
  for (const e of root.querySelectorAll('*')) { found.push(e); if (e.shadowRoot) all(e.shadowRoot, found) }
  return found
}
setTimeout(() => {
  const canvases = all(document, []).filter(e => e.classList.contains('bk-events'))
  for (const [canvas, x, y] of [[0, 0.6, 0.5], [1, 0.55, 0.6]]) {
    const box = canvases[canvas].getBoundingClientRect()
    const at = {clientX: box.left + box.width * x, clientY: box.top + box.height * y, bubbles: true, composed: true}
    for (const kind of ['pointerenter', 'pointermove'])
      canvases[canvas].dispatchEvent(new PointerEvent(kind, {...at, pointerType: 'mouse', isPrimary: true}))
  }
  setTimeout(() => {
    const tips = all(document, []).filter(e => String(e.className).includes('bk-tooltip-content'))
    document.body.innerHTML = '<pre>TIPS ' + tips.map(e => e.innerText).join(' ').replace(/\\s+/g, ' ') + '</pre>'
  }, 1000)
}, 3000)
</script>"""


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
def test_the_page_is_one_file_that_loads_nothing_and_text_of_the_run_is_escaped(tmp_path):
    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, dict(attrs)))

    text = make_page(tmp_path, "a&<b>.jsonl", lambda n: {EVIL: float(n)}).read_text()
    Reader().feed(text)
    tags = [tag for tag, _ in seen]
    assert not {"img", "link", "b>", "iframe", "object"} & set(tags)
    assert not any({"src", "href", "onerror", "onload"} & set(attrs) for _, attrs in seen)
    policy = next(attrs["content"] for _, attrs in seen if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "http" not in policy and "unsafe-eval" not in policy
    assert len(text) < 2_000_000
    assert "a&amp;&lt;b&gt;.jsonl" in text and EVIL not in text
    assert "Layer 5 collapses onto few experts: the entropy of its loads is 0.00" in text
    assert "every expert had tokens" not in text and "as if only 2 of its 4 experts" in text


@pytest.mark.quick
def test_the_verdict_is_of_the_last_line(tmp_path):
    assert "In the last line every expert had tokens.<" in make_page(tmp_path, collapses=False).read_text()
    assert "Layer 5 collapses" in make_page(tmp_path).read_text()


@pytest.mark.quick
def test_a_point_of_a_heat_map_is_as_long_as_its_batches():
    (image,) = _over_time(np.array([[0.0, 1.0, 2.0]]), "layer 0", [1010, 1020, 1120]).renderers
    data = image.data_source.data
    assert (data["x"], list(data["dw"])) == ([1000, 1010, 1020], [10, 10, 100])
    assert [float(column[0, 0]) for column in data["image"]] == [0.0, 1.0, 2.0]


def test_a_run_leaves_its_page_and_one_without_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {"file": "~/load.jsonl", "html": "~/deep/load.html"}
    fit(mpt(), callbacks=[ExpertLoad(**paths)], duration="2ba")
    text = (tmp_path / "deep" / "load.html").read_text()
    assert "Up to batch 2: 2 layers of 4 experts, 2 lines." in text
    for title in ("whole run", "last point, up to batch 2", "layer 0", "layer 1"):
        assert f'"text":"{title}"' in text
    assert text.count('"name":"Line"') >= 3 and '"axis_label":"loss"' in text, "the run's file has its loss"
    with pytest.raises(ValueError, match=r"expert_load.html \(x.html\) is a page of `file`: give file too"):
        ExpertLoad(html="x.html")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_browser_draws_the_heat_maps_and_shows_the_values_of_a_cell(tmp_path):
    page, picture = make_page(tmp_path, metrics=lambda n: {"loss/train/total": 9.0 - n}), tmp_path / "shot.png"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1600",
        "--virtual-time-budget=20000",
    ]  # fmt: skip
    document = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "<title>Expert load: loads.jsonl</title>" in document
    (tmp_path / "hover.html").write_text(page.read_text() + HOVER)
    shown = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "hover.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    tips = shown[shown.index("<pre>TIPS ") :]
    assert "batch: 40 worst MaxVio: 2.08 (layer 5) mean MaxVio: 1.04 loss: 5.000" in tips, tips
    assert "layer: 5 expert: 2 load over mean: 0.38" in tips, tips
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120, check=True)
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    for colour in (RED, BLUE):  # cells of the last point, in both kinds of heat map
        assert (np.abs(pixels - colour).max(-1) <= 3).sum() > 40 * 20
