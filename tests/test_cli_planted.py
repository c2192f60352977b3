"""`levattention planted`: a sweep, a page, its pictures and its numbers."""

import base64
import json
import re
import subprocess
import sys

import pytest

from browser import measured, needs_browser
from levattention.cli import main
from levattention.planted.sweep import DELTA_DIMENSIONS, DELTA_SIZES, Sweep
from levattention.planted_report import shades
from tags import Tags

SMALL = ["--n", "300", "--n", "600", "--k", "16", "--k", "128", "--eps1", "1e-4", "--eps1", "0.1", "--d", "512"]
SMALL += ["--standout", "4", "--queries", "10", "--scaling", "1000", "--scaling", "2000"]


def levattention(*args):
    return subprocess.run(
        [sys.executable, "-c", "from levattention.cli import main; main()", *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "new" / "folder"
    done = levattention("planted", "--out", str(out), *SMALL)
    assert done.returncode == 0, done.stderr
    return out, done


def test_files_and_nothing_else(report):
    out, done = report
    names = {path.name for path in out.iterdir()}
    pictures = {f"planted-{name}.png" for name in ("delta1", "candidates", "recovery", "time")}
    assert names == pictures | {"planted.html", "planted.json"}
    assert "Report:" in done.stdout
    assert "false keys 0" in " ".join(done.stdout.split())


def test_numbers(report):
    found = json.loads((report[0] / "planted.json").read_text())
    assert [(row["n"], row["k"], row["eps1"]) for row in found["settings"]] == [
        (n, k, eps1) for n in (300, 600) for k in (16, 128) for eps1 in (1e-4, 0.1)
    ]
    assert len(found["delta1"]) == len(DELTA_DIMENSIONS) * len(DELTA_SIZES)
    for row in found["settings"]:
        assert row["standout_kept"] == 1
        assert row["size"] == 4
        assert row["size"] <= row["candidates"] <= row["universal"] <= row["n"]
        assert row["holds"] == (row["delta2"] <= row["delta1"] <= 0.25) == (row["problems"] == [])
        assert (row["recovered"], row["false_keys"]) == ((1.0, 0) if row["holds"] else (None, None))
        assert row["rho"] == pytest.approx(1 / (1 + row["delta1"] ** 2 * 4 + row["delta2"] ** 2 * row["n"]))
    assert any(row["holds"] for row in found["settings"])
    assert not all(row["holds"] for row in found["settings"])
    for row in found["scaling"]:
        assert (row["recovered"], row["scan_recovered"], row["false_keys"], row["candidates"]) == (1.0, 1.0, 0, 16)
        assert min(row[f"{name}_seconds"] for name in ("check", "recover", "query", "batch", "scan")) > 0
    for row in found["delta1"]:
        if row["k"] > 16:
            assert min(row["measured"]) > row["paper"]


def test_page_is_whole_and_needs_nothing_else(report):
    out, _ = report
    text = (out / "planted.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert len(tags.images) == 4
    for image in tags.images:
        assert image["alt"]
        png = base64.b64decode(image["src"].removeprefix("data:image/png;base64,"), validate=True)
        assert png.startswith(b"\x89PNG")
        assert any(png == path.read_bytes() for path in out.glob("*.png"))
    assert (tags.rows.count("holds"), tags.rows.count("fails")) == tuple(
        sum(row["holds"] == holds for row in json.loads((out / "planted.json").read_text())["settings"])
        for holds in (True, False)
    )
    assert not re.search(r"(?:src|href)=[\"']?http", text)


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_page_fits_the_screen(report, width):
    seen = measured(report[0] / "planted.html", width)
    assert (seen["width"], seen["content"], seen["out"], seen["failed"]) == (width, width, [], 0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--k", "200", "--d", "512"], "k: expected k ≤ d/4 = 128, got 200"),
        (["--eps0", "1e-5"], "eps0: expected ε0·n ≥ 1"),
        (["--eps0", "0.1", "--standout", "3"], "give at most one of --standout and --eps0"),
        (["--standout", "3000"], "standout: expected at most n = 2000 keys, got 3000"),
        (["--standout", "0"], "standout: expected at least 1"),
        (["--queries", "0"], "count: expected at least 1"),
        (["--eps1", "-1"], "eps1: expected a finite number"),
        (["--n", "0"], "standout: expected at most n = 0"),
        (["--scaling", "8"], "scaling: expected n ≥ 16"),
    ],
)
def test_impossible_settings_end_in_one_line(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.setattr(sys, "argv", ["levattention", "planted", "--out", str(tmp_path / "out"), *args])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("levattention: ")
    assert message in told
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "out").write_text("mine")
    done = levattention("planted", "--out", str(tmp_path / "out"), *SMALL)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out").read_text() == "mine"


def test_sweep_needs_values():
    with pytest.raises(ValueError, match="eps1: expected at least one value"):
        Sweep(eps1=())


@pytest.mark.parametrize("count", [1, 3, 7])
def test_one_shade_each(count):
    assert len({str(colour) for colour in shades(count)}) == count
