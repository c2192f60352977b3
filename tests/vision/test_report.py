"""The demo's report: whole, true to its numbers, and as a browser shows it."""

import base64
import io
import re

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")

from PIL import Image
from rich.console import Console

from browser import measured, needs_browser, screenshot
from levattention.demo import run_demo
from levattention.integrations.huggingface import use_lev_attention
from levattention.pages import page
from levattention.vision.evaluate import evaluate
from levattention.vision.results import percent
from tags import Tags
from tiny_models import PREPARE, some_images, tiny_vit

SELECTORS = ["leverage", "norm", "cluster"]


def models():
    return [
        ("trained one way", tiny_vit(4), PREPARE),
        ("trained <otherwise>", use_lev_attention(tiny_vit(1), top_k=5), PREPARE),
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    screen = Console(file=io.StringIO(), width=100)
    threads = torch.get_num_threads()
    run_demo(out, screen, Console(quiet=True), models(), some_images(7), looked_at=5, top_k=5, selectors=SELECTORS)
    assert torch.get_num_threads() == threads
    return out, screen.file.getvalue()


def test_files_and_what_is_printed(report):
    out, printed = report
    assert {path.name for path in out.iterdir()} == {"report.html", "universal_set.png"}
    assert "none got through" in printed
    assert "24 of 24" in printed
    assert str(out / "report.html") in printed.replace("\n", "")
    for name in ("trained one way", "trained <otherwise>"):
        assert f"Model {name}, 7 images" in printed


def test_page_is_whole_and_needs_nothing_else(report):
    text = (report[0] / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    # Scores, bars, neighbourhood, three histograms, W_j, and the universal keys of both models.
    assert len(tags.images) == 9
    for image in tags.images:
        assert len(image["alt"]) > 20
        kind, content = re.fullmatch(r"data:image/(png|jpeg);base64,(.+)", image["src"]).groups()
        with Image.open(io.BytesIO(base64.b64decode(content, validate=True))) as picture:
            assert picture.format == kind.upper()
            assert np.asarray(picture.convert("L")).std() > 5
    assert not re.search(r"(?:src|href)=[\"']?http|<script|@import|url\(", text)
    assert "<otherwise>" not in text
    assert len(text) < 5e6


def test_page_has_the_numbers(report):
    """Every row of the table, computed again."""
    text = (report[0] / "report.html").read_text()
    tables = [
        list(evaluate(model, some_images(7), prepare, selectors=SELECTORS, budgets=[5]))
        for _, model, prepare in models()
    ]
    for rows in zip(*tables, strict=True):
        values = []
        for row in rows:
            values += [percent(row["top1"]), "–".join(map(percent, row["top1_interval"])), percent(row["agree"])]
        assert "".join(f"<td>{value}</td>" for value in values) in text
    # The case is sharp: the numbers differ from row to row.
    assert len({(row["top1"], row["agree"]) for rows in tables for row in rows}) > 3


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_page_fits_the_screen(report, width):
    seen = measured(report[0] / "report.html", width)
    assert (seen["width"], seen["content"], seen["out"]) == (width, width, [])
    assert (seen["images"], seen["failed"], seen["unseen"]) == (9, 0, 0)
    assert seen["smallest"] >= 12
    assert seen["text"] > 2000


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_page_is_seen(report, tmp_path, width):
    screenshot(report[0] / "report.html", width, tmp_path / "seen.png", height=1600)
    with Image.open(tmp_path / "seen.png") as picture:
        seen = np.asarray(picture.convert("L").crop((0, 0, width, 1600)))
    # Something in every quarter, from top to bottom.
    assert all(part.std() > 5 for part in np.array_split(seen, 4))


@needs_browser
def test_a_page_that_does_not_fit_is_found(tmp_path):
    """What the tests above look for does show: a table that sticks out, and a picture that is broken."""
    wide = "<table><tr>" + "<td>0123456789</td>" * 40 + "</tr></table>"
    (tmp_path / "bad.html").write_text(page("Bad", wide + '<img alt="" src="data:image/png;base64,AAAA">'))
    seen = measured(tmp_path / "bad.html", 400)
    assert seen["content"] > 400
    assert any(name.startswith("TABLE") for name in seen["out"])
    assert (seen["images"], seen["failed"]) == (1, 1)
    (tmp_path / "good.html").write_text(page("Good", f'<div class="wide">{wide}</div>'))
    seen = measured(tmp_path / "good.html", 400)
    assert (seen["content"], seen["out"]) == (400, [])
