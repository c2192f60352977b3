"""`levattention index` and `levattention query` as a person meets them."""

import contextlib
import io
import json
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch

import levattention as la
from levattention.cli import main
from strategies import heavy_tailed
from test_heavy import spoiled


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(*arguments, check=True):
    """The command in this process: starting torch anew for each would take longer than all of them."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            sys.argv = ["levattention", *map(str, arguments)]
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            sys.argv = before
    if check:
        assert code == 0, err.getvalue()
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keys, queries (the last one zero), and the index of the keys for p = 4 as the command line writes it."""
    place = tmp_path_factory.mktemp("heavy")
    keys = heavy_tailed(600, 4).float()
    queries = torch.cat([keys[:6], torch.zeros(1, 4)])
    np.save(place / "keys.npy", keys.numpy())
    np.save(place / "queries.npy", queries.numpy())
    done = run("index", place / "keys.npy", "--eps", 0.02, "--p", 4, "-o", place / "keys.lev", "--json")
    (place / "stats.json").write_text(done.stdout)
    return place


def test_index_writes_what_the_library_would(folder):
    stats = json.loads((folder / "stats.json").read_text())
    keys = torch.from_numpy(np.load(folder / "keys.npy"))
    expected = la.HeavyIndex(keys, 0.02, la.Power(4)).stats()
    assert {name: stats[name] for name in expected} == expected
    assert stats["file bytes"] == (folder / "keys.lev").stat().st_size
    assert la.HeavyIndex.load(folder / "keys.lev").stats() == expected


def test_query_prints_a_table_json_and_writes_arrays(folder, tmp_path):
    out = tmp_path / "hits.npz"
    done = run("query", folder / "keys.lev", folder / "queries.npy", "--json", "--out", out)
    answer = json.loads(done.stdout)
    assert "1 give no key any weight" in done.stderr
    keys, queries = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("keys", "queries"))
    for hits, q in zip(answer["hits"], queries, strict=True):
        expected = la.heavy_keys(keys, q, 0.02, la.Power(4)).tolist()
        assert sorted(hit["key"] for hit in hits) == expected
    saved = np.load(out)
    assert sorted(saved.files) == ["index", "undefined", "valid", "weight"]
    assert saved["undefined"].tolist() == [False] * 6 + [True]
    assert saved["index"][0][saved["valid"][0]].tolist() == [hit["key"] for hit in answer["hits"][0]]
    np.testing.assert_allclose(saved["weight"][0][saved["valid"][0]], [hit["weight"] for hit in answer["hits"][0]])
    text = run("query", folder / "keys.lev", folder / "queries.npy", "--rows", 3).stdout
    assert "Heavy keys" in text
    assert f"{answer['hits'][0][0]['key']} (" in text
    assert "4 more" in text
    assert "of 7 queries; Z exact up to rounding" in text


def test_index_shows_a_table_and_says_when_it_samples(folder, tmp_path):
    done = run("index", folder / "keys.npy", "--eps", 0.1, "--tukey", 2, "-o", tmp_path / "t.lev")
    assert "Index of heavy keys" in done.stdout
    assert "no exact one fits Tukey(threshold=2.0)" in " ".join(done.stderr.split())
    sampled = run(
        "index", folder / "keys.npy", "--eps", 0.1, "--p", 1.5, "--delta", 0.3, "-o", tmp_path / "s.lev", "--json"
    )
    assert sampled.stderr.strip() == ""
    assert json.loads(sampled.stdout)["normaliser"].startswith("within 1 ± 0.3 for each query")


def bad_queries(folder):
    np.save(folder / "wide.npy", np.ones((3, 5), dtype=np.float32))
    holed = np.ones((3, 4), dtype=np.float32)
    holed[1, 2] = np.nan
    np.save(folder / "nan.npy", holed)
    return [("wide.npy", "queries: expected shape ('m', 4), got (3, 5)"), ("nan.npy", "queries: row 1 holds nan")]


def refused(done, message):
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_bad_queries_end_in_one_line(folder, tmp_path):
    for name, message in bad_queries(tmp_path):
        refused(run("query", folder / "keys.lev", tmp_path / name, "--out", tmp_path / "h.npz", check=False), message)
    assert not (tmp_path / "h.npz").exists()


def test_files_that_are_no_index_end_in_one_line(folder, tmp_path):
    """Three of the spoiled files through the command line; the others are read by the same code."""
    messages = spoiled(tmp_path)
    for name in ("cut.lev", "other.lev", "newer.lev"):
        refused(run("query", tmp_path / name, folder / "queries.npy", check=False), messages[name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.npy", "--eps", 0.1, "-o", "x.lev"], "no such file"),
        (["keys.npy", "--eps", 2, "-o", "x.lev"], "eps: expected a number in (0, 1], got 2.0"),
        (["keys.npy", "--eps", 0.1, "--p", 0.5, "-o", "x.lev"], "p: expected a finite number >= 1"),
        (["keys.npy", "--eps", 0.1, "-o", "x.npz"], "expected a name that ends in .lev"),
        (["keys.npy", "--eps", 0.1, "--p", 2, "--huber", 1, "-o", "x.lev"], "at most one of --p, --huber and --tukey"),
    ],
)
def test_bad_input_to_index_ends_in_one_line(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    refused(run("index", *arguments, check=False), message)
    assert not (folder / "x.lev").exists()


def test_a_process_of_its_own_ends_alike(folder):
    command = [sys.executable, "-c", "from levattention.cli import main; main()", "query"]
    done = subprocess.run([*command, folder / "keys.npy", folder / "queries.npy"], capture_output=True, text=True)
    refused(done, "not a readable levattention index")
    assert done.stdout == ""
