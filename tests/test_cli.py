"""The command line as a person meets it: tables, JSON, files, and one line for bad input."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import levattention as la


def run(*arguments, check=True):
    command = [sys.executable, "-c", "from levattention.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if check:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def keys(tmp_path, generator):
    matrix = torch.randn(500, 8, generator=generator)
    np.save(tmp_path / "keys.npy", matrix.numpy())
    return matrix, tmp_path / "keys.npy"


def test_find_prints_json_and_writes_the_set(keys, tmp_path):
    matrix, path = keys
    out = tmp_path / "U.npz"
    answer = json.loads(run("find", path, "--eps", 0.04, "--json", "--out", out).stdout)
    u = la.universal_set(matrix, eps=0.04)
    expected = u.index[u.valid].tolist()
    assert answer["index"] == expected
    assert (answer["n"], answer["d"], answer["rank"], answer["size"]) == (500, 8, 8, len(expected))
    saved = np.load(out)
    assert saved["index"].tolist() == expected
    np.testing.assert_allclose(saved["scores"], u.scores[u.valid])
    assert float(saved["eps"]) == 0.04


def test_find_prints_a_table(keys):
    text = run("find", keys[1], "--top", 3).stdout
    best = la.universal_set(keys[0], k=3).index.tolist()
    assert "Universal set" in text
    assert all(str(position) in text for position in best)


def test_find_reads_safetensors_and_heads(tmp_path, generator):
    heads = torch.randn(3, 100, 4, generator=generator).bfloat16()
    path = tmp_path / "cache.safetensors"
    save_file({"k": heads, "v": heads.clone()}, path)
    answer = json.loads(run("find", path, "--tensor", "k", "--top", 5, "--json").stdout)
    assert answer["index"] == la.universal_set(heads, k=5).index.tolist()
    refused = run("find", path, "--top", 5, check=False)
    assert refused.returncode == 2
    assert "give --tensor NAME; it holds k, v" in refused.stderr


def bad_inputs(folder):
    np.save(folder / "ints.npy", np.ones((4, 2), dtype=np.int64))
    np.save(folder / "line.npy", np.ones(4))
    holed = np.ones((1000, 3), dtype=np.float32)
    holed[777, 1] = np.nan
    np.save(folder / "nan.npy", holed)
    np.save(folder / "good.npy", np.ones((4, 2)))
    whole = (folder / "good.npy").read_bytes()
    (folder / "short.npy").write_bytes(whole[:-10])
    (folder / "note.txt").write_text("hello")
    (folder / "junk.safetensors").write_bytes(b"not a tensor file")
    return [
        (["missing.npy", "--top", 1], "no such file"),
        (["note.txt", "--top", 1], "expected a .npy, .safetensors or .parquet file"),
        (["short.npy", "--top", 1], "not a readable .npy array"),
        (["junk.safetensors", "--top", 1], "not a readable .safetensors file"),
        (["ints.npy", "--top", 1], "expected float16, float32 or float64, got int64"),
        (["line.npy", "--top", 1], "at least two dimensions"),
        (["nan.npy", "--top", 1], "row 777 holds nan"),
        (["good.npy"], "exactly one of --eps and --top"),
        (["good.npy", "--eps", 2], "eps: expected a number in (0, 1], got 2.0"),
        (["good.npy", "--top", 9], "k: expected an integer between 1 and n = 4, got 9"),
        (["good.npy", "--top", 1, "--out", "nowhere/U.npz"], "does not exist"),
        (["good.npy", "--top", 1, "--out", "U.txt"], "expected a name that ends in .npz"),
    ]


@pytest.mark.parametrize("case", range(12))
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, case, monkeypatch):
    arguments, message = bad_inputs(tmp_path)[case]
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    done = (
        run("find", *arguments, "--out", "U.npz", check=False)
        if "--out" not in arguments
        else run("find", *arguments, check=False)
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_an_old_result_survives_a_failed_run(keys, tmp_path):
    out = tmp_path / "U.npz"
    out.write_bytes(b"precious")
    bad = keys[0].clone()
    bad[3] = float("inf")
    np.save(tmp_path / "bad.npy", bad.numpy())
    assert run("find", tmp_path / "bad.npy", "--top", 2, "--out", out, check=False).returncode == 2
    assert out.read_bytes() == b"precious"


def test_demo_shows_tables_and_writes_a_report(tmp_path):
    for name in ("transformers", "matplotlib", "PIL"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    text = run("demo", "--out", tmp_path / "demo", "--images", 4).stdout
    assert "none got through" in text
    assert "24 of 24" in text
    for name in ("softmax", "leverage top-32"):
        assert f"Model trained with {name}, 4 images" in text
    assert (tmp_path / "demo" / "universal_set.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "4 images of" in page
    assert page.count("<img ") == 9


@pytest.mark.parametrize("command", ["demo", "vit eval", "vit structure"])
def test_a_missing_extra_is_one_line(tmp_path, command):
    hidden = "import sys; sys.modules['transformers'] = None; sys.modules['matplotlib'] = None; "
    code = hidden + "from levattention.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split(), "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "transformers and matplotlib not installed: pip install 'levattention[vit]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
