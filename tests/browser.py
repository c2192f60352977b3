"""Pages looked at by a real browser: headless Chromium, where one is installed."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--allow-file-access-from-files"]

# A frame has exactly the width asked for; a window may not be narrower than the browser likes. What lies in a part that
# scrolls sideways by itself may stick out of the page.
MEASURE = """
<body style="margin:0"><iframe id="page" src="SOURCE" style="border:0;width:WIDTHpx;height:HEIGHTpx"></iframe>
<script>
window.onload = () => {
  const page = document.getElementById("page").contentDocument, root = page.documentElement;
  const scrolls = (e) => e && (["auto", "scroll"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const out = [...page.body.querySelectorAll("*")].filter(
    (e) => e.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(e.parentElement));
  const images = [...page.images];
  document.body.setAttribute("data-found", JSON.stringify({
    width: root.clientWidth, content: root.scrollWidth, height: root.scrollHeight, images: images.length,
    failed: images.filter((i) => !i.complete || i.naturalWidth === 0).length,
    unseen: images.filter((i) => i.getBoundingClientRect().width < 100).length,
    text: page.body.innerText.length, out: out.map((e) => e.tagName + ": " + e.textContent.slice(0, 40)),
    smallest: Math.min(...[...page.body.querySelectorAll("p, td, th, li, figcaption")].map(
      (e) => parseFloat(getComputedStyle(e).fontSize))),
  }));
};
</script>
"""


def browse(page, width, *flags, height=900):
    """What Chromium prints for the page in a frame of this width."""
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        text = MEASURE.replace("SOURCE", Path(page).resolve().as_uri())
        frame.write_text(text.replace("WIDTH", str(width)).replace("HEIGHT", str(height)))
        window = [f"--user-data-dir={folder}/profile", f"--window-size={max(width, 600)},{height}"]
        command = [CHROMIUM, *FLAGS, *window, *flags, frame.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def measured(page, width):
    """How the page lies in a frame of this width."""
    dom = browse(page, width, "--virtual-time-budget=10000", "--dump-dom")
    return json.loads(dom.split('data-found="')[1].split('"')[0].replace("&quot;", '"').replace("&amp;", "&"))


def screenshot(page, width, png, height=900):
    """A picture of the top of the page in a frame of this width."""
    browse(page, width, f"--screenshot={png}", height=height)
