"""Training: what a step sees, that the loss falls, and that a killed run goes on as if nothing had happened."""

from __future__ import annotations

import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from levattention.cli import app
from levattention.vision import Augment, Recipe, Selection, Shape, load_recipe, load_vit, read_checkpoint
from levattention.vision.evaluate import rank
from levattention.vision.images import ArrayImages
from levattention.vision.overlap import overlap
from levattention.vision.runfolder import RunFolder, read_metrics
from levattention.vision.train import Trainer, train

TINY = Shape(image=8, patch=2, channels=1, classes=2, hidden=12, layers=2, heads=2, mlp=16)
RECIPE = Recipe(
    shape=TINY,
    mean=(0.5,),
    std=(0.25,),
    epochs=5,
    batch=16,
    lr=1e-2,
    weight_decay=0.01,
    warmup=4,
    selection=Selection("leverage", 6),
    warm_start=0.15,
    save_every=7,
    log_every=1,
    overlap_images=3,
)
AS_FILE = f"""
from levattention.vision import Augment, Recipe, Selection, Shape

def tiny() -> Recipe:
    return {RECIPE!r}
"""
# What differs from run to run.
CLOCK = ("images_per_second", "seconds")


def halves(count, seed=0):
    """Noise that is brighter above (class 0) or below (class 1)."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 160, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 2, (count,), generator=generator)
    for image, label in zip(pixels, labels, strict=True):
        image[:, 4 * label : 4 * label + 4] += 95
    return ArrayImages("halves", pixels, labels, ("above", "below"))


def untimed(path):
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in read_metrics(path)]


def write_idx(folder, images, stem):
    folder.mkdir(exist_ok=True)
    for kind, array in (
        ("images-idx3", images.pixels.squeeze(1).numpy()),
        ("labels-idx1", images.labels.numpy().astype(np.uint8)),
    ):
        header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
        (folder / f"{stem}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, last line) of a whole run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train(RECIPE, halves(160), halves(100, 1), out, cpu=True)


def test_it_learns_and_says_what_it_did(finished):
    """Of 100 fresh images that a line separates, chance would get 75 right with probability 3e-7."""
    out, last = finished
    lines = read_metrics(out)
    losses = [line for line in lines if "loss" in line]
    assert [line["step"] for line in losses] == list(range(1, 51))
    # 15 % of 50 steps, rounded.
    assert [line["attention"] for line in losses] == ["full"] * 8 + ["leverage top-6"] * 42
    assert losses[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    tests = [line for line in lines if "top1" in line]
    assert [line["epoch"] for line in tests] == [1, 2, 3, 4, 5]
    assert np.shape(last["overlap"]) == (2, 2)
    assert last["top1"] > 0.75
    assert last["top1_interval"][0] < last["top1"] < last["top1_interval"][1]
    assert json.loads((out / "recipe.json").read_text())["recipe"] == RECIPE.as_dict()


def test_the_model_written_is_the_one_that_was_tested(finished):
    out, last = finished
    model, preprocess = load_vit(out)
    assert model.selection == RECIPE.selection
    ranked, labels, _ = rank(model, halves(100, 1), preprocess, 32)
    # Stored in fp16: an image on the fence may change sides.
    assert float((ranked[:, 0] == labels).double().mean()) == pytest.approx(last["top1"], abs=0.021)
    about = read_checkpoint(out)
    assert (about["step"], about["steps"], about["top1"]) == (50, 50, last["top1"])
    assert about["classes"] == ["above", "below"]


def test_a_killed_run_goes_on_with_the_same_losses(tmp_path):
    """kill -9 from outside between two checkpoints, then --resume: every number as in the run left alone."""
    training, test = halves(160), halves(30, 1)
    write_idx(tmp_path / "data", training, "train")
    write_idx(tmp_path / "data", test, "t10k")
    (tmp_path / "recipes.py").write_text(AS_FILE)
    command = [sys.executable, "-c", "from levattention.cli import main; main()", "vit", "train"]
    command += [f"{tmp_path}/recipes.py:tiny", "--data", str(tmp_path / "data"), "--cpu", "--set", "epochs=15", "--out"]
    whole, command = [*command, str(tmp_path / "whole")], [*command, str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    metrics = tmp_path / "run" / "metrics.jsonl"
    started = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and started.poll() is None:
        if metrics.is_file() and metrics.read_text().count('"loss"') >= 38:
            break
        time.sleep(0.002)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    reached = json.loads([line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")][-1])
    assert 38 <= reached["step"] < 150
    # As if killed while it wrote a line.
    with metrics.open("a") as file:
        file.write('{"step": ')
    done = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, check=True)
    assert "of data test" in done.stdout
    # In a process of its own too: how many threads a product is cut into, and so its last bit, is the process's state.
    subprocess.run(whole, env=environment, capture_output=True, check=True)
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")
    for name in ("model.safetensors", "state.safetensors"):
        ours, theirs = (_tensors(tmp_path / run / name) for run in ("run", "whole"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def _tensors(path):
    from safetensors.torch import load_file

    return load_file(path)


def test_what_can_be_resumed(tmp_path, finished):
    with pytest.raises(ValueError, match=r"recipe\.lr 0\.01 then and 0\.02 now"):
        train(replace(RECIPE, lr=0.02), halves(160), halves(10), finished[0], resume=True, cpu=True)
    # Without a checkpoint there is nothing to go on from, and the run starts afresh.
    short = replace(RECIPE, epochs=0.1)
    assert train(short, halves(160), halves(10), tmp_path / "new", resume=True, cpu=True)["step"] == 1
    # Without --resume an earlier run is replaced whole.
    assert train(short, halves(160), halves(10), tmp_path / "new", cpu=True)["step"] == 1
    assert len(read_metrics(tmp_path / "new")) == 2
    # A finished run that is resumed has nothing left to do.
    assert train(short, halves(160), halves(10), tmp_path / "new", resume=True, cpu=True)["step"] == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="expected an empty folder or one of an earlier run"):
        train(short, halves(160), halves(10), tmp_path / "other", cpu=True)
    assert (tmp_path / "other" / "thesis.tex").is_file()
    with pytest.raises(ValueError, match="expected 2 classes as in the model, got 10"):
        train(short, ArrayImages("ten", torch.zeros(4, 1, 8, 8), torch.zeros(4), list("abcdefghij")), halves(10), "x")


def test_a_step_is_adamws_on_the_mean_loss():
    """By hand: the gradient of the mean cross-entropy, clipped, and decay of the matrices alone."""
    recipe = replace(RECIPE, selection=None, clip=0.05, warmup=1, weight_decay=0.5)
    images = halves(16)
    trainer = Trainer(recipe, 160, cpu=True)
    trainer.prepare()
    model = recipe.shape.build(recipe.seed)
    for one in (model, trainer.model):
        # A classifier of zeros, from which training starts, sends no gradient down.
        torch.nn.init.normal_(one.classifier.weight, generator=torch.Generator().manual_seed(1))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer.step(0, images.pixels, images.labels, torch.Generator())
    pixels = (images.pixels / 255 - 0.5) / 0.25
    cross_entropy(model(pixel_values=pixels).logits, images.labels).backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    norm = float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
    assert norm > 0.05
    for name, got in trainer.model.named_parameters():
        gradient = gradients[name] * 0.05 / norm
        matrix = name.endswith("weight") and before[name].ndim > 1
        want = before[name] * (1 - 0.01 * 0.5 * matrix) - 0.01 * gradient / (gradient.abs() + 1e-8)
        # A gradient next to Adam's 1e-8 has no certain direction.
        sure = (gradient.abs() > 1e-6) | (gradient == 0)
        torch.testing.assert_close(got.detach()[sure], want[sure], rtol=1e-4, atol=1e-5)
    assert not before["vit.embeddings.position_embeddings"].equal(trainer.model.vit.embeddings.position_embeddings)


def test_parts_of_a_batch_make_the_same_step():
    images, models = halves(16), []
    for micro_batch in (0, 5):
        trainer = Trainer(replace(RECIPE, selection=None, micro_batch=micro_batch, warmup=0), 160, cpu=True)
        trainer.prepare()
        torch.nn.init.ones_(trainer.model.classifier.weight[:1])
        loss = trainer.step(0, images.pixels, images.labels, torch.Generator())
        gradients = trainer.optimizer.state[trainer.model.classifier.weight]["exp_avg"]
        models.append((float(loss), gradients))
    assert models[0][0] == pytest.approx(models[1][0], rel=1e-5)
    torch.testing.assert_close(models[0][1], models[1][1], rtol=1e-4, atol=1e-7)


def test_bf16_trains_too(tmp_path):
    recipe = replace(RECIPE, epochs=1, bf16=True, seed=3)
    line = train(recipe, halves(80), halves(10), tmp_path / "bf16", cpu=True)
    plain = train(replace(recipe, bf16=False), halves(80), halves(10), tmp_path / "fp32", cpu=True)
    assert line["step"] == plain["step"] == 5
    one, two = ([line["loss"] for line in read_metrics(tmp_path / run) if "loss" in line] for run in ("bf16", "fp32"))
    np.testing.assert_allclose(one, two, rtol=0.03)
    assert one != two


def test_compiled_full_attention_gets_no_mask():
    """With the one that transformers makes for a graph, CUDA has no fused attention."""
    masks = []

    def backend(graph, inputs):
        nodes = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        masks.extend(node.kwargs["attn_mask"] for node in nodes)
        return graph.forward

    trainer = Trainer(replace(RECIPE, selection=None), 160, cpu=True)
    model, pixels = trainer.model, torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    got = torch.compile(model, backend=backend, fullgraph=True)(pixel_values=pixels).logits
    assert masks == [None, None]
    model.set_attn_implementation("sdpa")
    assert got.equal(model(pixel_values=pixels).logits)


@pytest.mark.parametrize("fused", [None, True])
def test_the_optimizers_steps_are_counted_where_it_wants_them(tmp_path, fused):
    """Restored on another device than the CPU. An optimizer of another kind than was saved takes them too."""
    model = TINY.build(0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(pixel_values=torch.ones(1, 1, 8, 8)).logits.sum().backward()
    optimizer.step()
    RunFolder(tmp_path / "run", {}, resume=False).save(model, optimizer, 1, 0.0)
    elsewhere = TINY.build(0).to("meta")
    optimizer = torch.optim.AdamW(elsewhere.parameters(), fused=fused)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weights of no storage take no values
        assert RunFolder(tmp_path / "run", {}, resume=True).load(elsewhere, optimizer) == (1, 0.0)
    state = optimizer.state[elsewhere.classifier.weight]
    assert (state["step"].device.type, state["exp_avg"].device.type) == ("meta" if fused else "cpu", "meta")


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    with pytest.raises(ValueError, match=r"lr: the loss is (nan|inf) at step \d"):
        train(replace(RECIPE, lr=1e30, warmup=0), halves(160), halves(10), tmp_path / "run", cpu=True)
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_full_attention_and_top_k_beyond_all_keys_are_one():
    """17 keys: leverage top-17 is full attention, so both take the same steps."""
    images, losses = halves(64), []
    for selection in (None, Selection("leverage", 17), Selection("leverage", 3)):
        trainer = Trainer(replace(RECIPE, selection=selection, warm_start=0.0, warmup=0), 64, cpu=True)
        trainer.prepare()
        losses.append([float(trainer.step(i, images.pixels, images.labels, torch.Generator())) for i in range(4)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert abs(losses[0][-1] - losses[2][-1]) > 1e-5


def test_overlap_counts_the_important_keys_in_u():
    """Keys made by hand: all queries look at the 32 odd tokens, and the first `count` tokens from `start` are long."""
    shape = Shape(image=16, patch=2, channels=1, classes=2, hidden=72, layers=1, heads=1, mlp=4)
    model = shape.build(0).eval()
    layer = model.vit.layers[0].attention

    def mark(row, tokens, size):
        """Coordinate `row` of the keys: `size` times a constant for these tokens, 0 for the others."""
        # A layer norm makes a at i and b elsewhere of the unit vector i; the last entries take up Σ b.
        layer.k_proj.weight[row] = 0.0
        layer.k_proj.weight[row, tokens] = size
        layer.k_proj.weight[row, 65:] = -size * len(tokens) / 7

    with torch.no_grad():
        model.vit.embeddings.patch_embeddings.projection.weight.zero_()
        model.vit.embeddings.position_embeddings.copy_(torch.eye(65, 72))
        for part in (layer.q_proj, layer.k_proj):
            part.weight.zero_()
        layer.q_proj.bias[0] = 100.0
        mark(0, list(range(1, 64, 2)), 1.0)
        pixels = torch.zeros(2, 1, 16, 16)
        for start, count, shared in ((20, 24, 12), (1, 1, 1), (0, 1, 0), (0, 65, 32)):
            mark(1, list(range(start, start + count)), 9.0)
            found = overlap(model, pixels, Selection("norm", count))
            assert found.tolist() == [[pytest.approx(shared / 32)]]
        # The 32 longest keys are now the important ones; by leverage too, and by default.
        mark(1, list(range(1, 64, 2)), 9.0)
        assert overlap(model, pixels).tolist() == [[1.0]]


def test_recipes_are_read_from_files(tmp_path):
    (tmp_path / "recipes.py").write_text(AS_FILE)
    (tmp_path / "broken.py").write_text("def tiny(:")
    file = f"{tmp_path}/recipes.py"
    assert load_recipe(f"{file}:tiny") == RECIPE
    changes = {"epochs": "2.5", "selection.top_k": "9", "augment.flip": "false", "selection.by": "norm", "seed": "4"}
    assert load_recipe(f"{file}:tiny", changes) == replace(
        RECIPE, epochs=2.5, seed=4, selection=Selection("norm", 9), augment=Augment(flip=False)
    )
    for reference, message in (
        (f"{tmp_path}/no.py:tiny", "there is no such file"),
        (f"{file}:huge", r"expected one of .*recipes\.py:tiny"),
        (file, r"expected one of .*recipes\.py:tiny"),
        (f"{tmp_path}/broken.py:tiny", r"broken\.py: cannot be run \(SyntaxError"),
    ):
        with pytest.raises(ValueError, match=message):
            load_recipe(reference)
    for name, text, message in (
        ("lrr", "1", "there is nothing of this name"),
        ("lr", "fast", "could not convert"),
        ("lr", "-1", "expected a positive number"),
        ("bf16", "yes", "expected true or false"),
        ("shape", "1", "is more than that"),
        ("selection.by", "leverge", "expected one of leverage"),
    ):
        with pytest.raises(ValueError, match=message):
            load_recipe(f"{file}:tiny", {name: text})


def test_bad_input_ends_in_one_line(tmp_path):
    (tmp_path / "recipes.py").write_text(AS_FILE)
    arguments = ["vit", "train", f"{tmp_path}/recipes.py:tiny", "--out", str(tmp_path / "run"), "--data"]
    for rest, message in (
        ([str(tmp_path / "no")], "there is nothing"),
        ([str(tmp_path), "--set", "lr"], "expected NAME=VALUE"),
    ):
        result = CliRunner().invoke(app, [*arguments, *rest])
        assert isinstance(result.exception, ValueError)
        assert message in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_a_run_that_comes_apart_keeps_its_last_good_checkpoint(tmp_path):
    """Even where the loss is not shown in between."""
    recipe = replace(RECIPE, lr=1e30, warmup=0, log_every=1000, save_every=1, overlap_images=0)
    with pytest.raises(ValueError, match=r"lr: the loss is (nan|inf) at step \d"):
        train(recipe, halves(160), halves(10), tmp_path / "run", cpu=True)
    state = tmp_path / "run" / "state.safetensors"
    assert not state.exists() or all(value.isfinite().all() for value in load_file(state).values())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("images", "batch"), [(50000, 3), (49, 7), (10, 4), (3, 8)])
def test_a_test_ends_every_epoch(images, batch):
    trainer = Trainer(replace(RECIPE, batch=batch, epochs=20), images, cpu=True)
    ends = [done for done in range(1, min(trainer.steps, 250_001)) if trainer.tested(done)]
    whole = [-(-epoch * images // batch) for epoch in range(1, 20)]
    assert ends == sorted({done for done in whole if done < min(trainer.steps, 250_001)})


def test_what_a_kill_left_behind_is_cleared_away(tmp_path):
    """Half-written files of a run that was killed are neither somebody's files nor kept."""
    torn = [tmp_path / f".{name}.{'0a' * 16}.{kind}" for name, kind in (("recipe", "json"), ("state", "safetensors"))]
    for path in torn:
        path.write_bytes(b"half")
    RunFolder(tmp_path, {"recipe": {}}, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]
    (tmp_path / "recipe.json").unlink()
    (tmp_path / ".state.mine.safetensors").write_bytes(b"mine")
    with pytest.raises(ValueError, match="got other files"):
        RunFolder(tmp_path, {"recipe": {}}, resume=True)
