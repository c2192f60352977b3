"""`levattention vit structure` and `vit eval`: files, tables, and one line for bad input."""

import csv
import json
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from PIL import Image

from levattention.cli import main
from levattention.vision.models import save_vit
from tiny_models import PREPARE, some_images, tiny_vit


@pytest.fixture
def place(tmp_path):
    """model.safetensors and images with labels.csv, one of which cannot be read in the folder `torn`."""
    save_vit(tmp_path / "model.safetensors", tiny_vit(4), PREPARE, half=False)
    for name in ("images", "torn"):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "labels.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["file", "label"])
            for i, (image, label) in enumerate(some_images(6)):
                Image.fromarray(np.asarray(image[0])).save(tmp_path / name / f"{i}.png")
                rows.writerow([f"{i}.png", label])
    whole = (tmp_path / "torn" / "2.png").read_bytes()
    (tmp_path / "torn" / "2.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty").mkdir()
    return tmp_path


def run(place, monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr) of the command, run in that folder."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["levattention", "vit", *map(str, arguments)])
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    told = capsys.readouterr()
    return code, told.out, told.err


GOOD = ["--model", "model.safetensors", "--data", "images"]


def test_eval_writes_table_numbers_and_plot(place, monkeypatch, capsys):
    options = ["--top-k", 3, "--top-k", 40, "--selector", "norm", "--selector", "lewis-1", "--out", "found"]
    code, out, err = run(place, monkeypatch, capsys, "eval", *GOOD, *options)
    assert code == 0, err
    assert "Lewis, p = 1" in out
    held = json.loads((place / "found" / "eval.json").read_text())
    assert [(row["method"], row["top_k"]) for row in held["rows"]] == [
        ("full", None), ("norm", 3), ("norm", 40), ("lewis-1", 3), ("lewis-1", 40)
    ]  # fmt: skip
    assert [held[name] for name in ("model", "data", "images", "skipped", "seed")] == ["model", "images", 6, 0, 0]
    assert str(place) not in (place / "found" / "eval.json").read_text()
    assert len((place / "found" / "eval.md").read_text().splitlines()) == 7
    assert (place / "found" / "eval.png").read_bytes().startswith(b"\x89PNG")
    with torch.no_grad():
        said = tiny_vit(4)(pixel_values=PREPARE(some_images(6).pixels)).logits.argmax(-1)
    assert held["rows"][0]["top1"] == float((said == some_images(6).labels).double().mean())


def test_eval_resumes_where_it_was(place, monkeypatch, capsys):
    options = ["--top-k", 3, "--selector", "norm", "--out", "found"]
    assert run(place, monkeypatch, capsys, "eval", *GOOD, *options)[0] == 0
    path = place / "found" / "eval.json"
    held = json.loads(path.read_text())
    held["rows"][1]["top1"] = 0.25
    path.write_text(json.dumps(held))
    assert run(place, monkeypatch, capsys, "eval", *GOOD, *options, "--selector", "random", "--resume")[0] == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["method"], row["top1"]) for row in rows[1:2]] == [("norm", 0.25)]
    assert [row["method"] for row in rows] == ["full", "norm", "random"]
    code, _, err = run(place, monkeypatch, capsys, "eval", *GOOD, *options, "--resume", "--images", 5)
    assert code == 2
    assert "made with another fingerprint and images" in err
    assert json.loads(path.read_text())["rows"] == rows
    # Rows that are not asked for stay.
    only = ["--top-k", 3, "--selector", "random", "--out", "found", "--resume"]
    assert run(place, monkeypatch, capsys, "eval", *GOOD, *only)[0] == 0
    kept = {(row["method"], row["top1"]) for row in json.loads(path.read_text())["rows"]}
    assert kept == {(row["method"], row["top1"]) for row in rows}
    # Another model of the same name is told from this one.
    save_vit(place / "model.safetensors", tiny_vit(5), PREPARE)
    code, _, err = run(place, monkeypatch, capsys, "eval", *GOOD, *only)
    assert code == 2
    assert "made with another fingerprint" in err
    assert run(place, monkeypatch, capsys, "eval", *GOOD, *options)[0] == 0
    assert json.loads(path.read_text())["rows"][1]["top1"] != 0.25


def test_structure_writes_numbers_and_pictures(place, monkeypatch, capsys):
    code, out, err = run(
        place, monkeypatch, capsys, "structure", *GOOD, "--top", 4, "--radius", 1, "--images", 5, "--out", "found"
    )
    assert code == 0, err
    assert "2 layers × 2; 37 tokens" in " ".join(out.split())
    names = {"top.png", "local.png", "covered.png", "nonlocal_mass.png", "nonlocal_mass_example.png"}
    names |= {"neighbourhood.jpg", "universal.jpg", "structure.json"}
    assert {path.name for path in (place / "found").iterdir()} == names
    for name in names - {"structure.json"}:
        with Image.open(place / "found" / name) as picture:
            # Not one flat colour.
            assert np.asarray(picture.convert("L")).std() > 10
    held = json.loads((place / "found" / "structure.json").read_text())
    assert [held[name] for name in ("layers", "heads", "tokens", "images", "radius", "top")] == [2, 2, 37, 5, 1, 4]
    for kind in ("top", "local", "covered"):
        shares = np.array(held["masses"][kind]["histogram"])
        assert shares.shape == (2, 2, 20)
        np.testing.assert_allclose(shares.sum(-1), 1, atol=1e-4)
    received = np.array(held["nonlocal_mass"])
    assert received.shape == (2, 2, 37)
    # What is not local is somebody's W_j.
    np.testing.assert_allclose(received.sum(-1), 37 * (1 - np.array(held["masses"]["local"]["mean"])), rtol=1e-4)


def test_images_that_cannot_be_read_are_named(place, monkeypatch, capsys):
    torn = ["--model", "model.safetensors", "--data", "torn", "--top-k", 3, "--selector", "norm", "--out", "found"]
    code, _, err = run(place, monkeypatch, capsys, "eval", *torn)
    assert (code, (place / "found").exists()) == (2, False)
    assert "2.png" in err
    code, _, err = run(place, monkeypatch, capsys, "eval", *torn, "--skip-bad")
    assert code == 0, err
    assert "1 images cannot be read" in err
    held = json.loads((place / "found" / "eval.json").read_text())
    assert (held["images"], held["skipped"]) == (5, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", *GOOD, "--selector", "best"], "selector: expected one of leverage"),
        (["eval", *GOOD, "--device", "nowhere"], "device: expected one that is there"),
        (["eval", "--model", "none.safetensors", "--data", "images"], "there is no such file or folder"),
        (["eval", "--model", "model.safetensors", "--data", "none"], "there is nothing"),
        (["eval", "--model", "model.safetensors", "--data", "empty"], "expected class folders"),
        (["eval", "--model", "empty", "--data", "images"], "expected model.safetensors"),
        (["eval", "--model", "images/labels.csv", "--data", "images"], "not a readable .safetensors file"),
        (["eval", "--model", "model.safetensors"], "--data: expected images for this --model"),
        (["structure", *GOOD, "--top", 38], "top: expected an integer between 1 and n = 37, got 38"),
        (["structure", *GOOD, "--split", "train"], "has no train images"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(place, monkeypatch, capsys, arguments, message):
    code, _, err = run(place, monkeypatch, capsys, *arguments, "--out", "found")
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (place / "found").exists()


def test_the_embedded_model_is_the_default(tmp_path, monkeypatch, capsys):
    code, _, err = run(
        tmp_path, monkeypatch, capsys, "eval", "--images", 20, "--selector", "norm", "--top-k", 200, "--out", "found"
    )
    assert code == 0, err
    held = json.loads((tmp_path / "found" / "eval.json").read_text())
    assert (held["model"], held["images"]) == ("embedded, softmax", 20)
    # Chance is 0.1: half of 20 are right by luck with probability 1e-5.
    assert held["rows"][0]["top1"] >= 0.5


def test_a_file_in_the_way(place, monkeypatch, capsys):
    (place / "found").write_text("mine")
    code, _, err = run(place, monkeypatch, capsys, "eval", *GOOD, "--selector", "norm", "--top-k", 3, "--out", "found")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert (place / "found").read_text() == "mine"
