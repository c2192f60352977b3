"""The recipes that come with the repository: sizes, schedules, and that each row differs where it should."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from levattention.vision import Recipe, Selection, Shape, load_recipe
from levattention.vision.selection import apply_selection
from levattention.vision.shape import sine_positions

CONFIGS = Path(__file__).resolve().parents[2] / "experiments" / "vit" / "configs"
IMAGES = 1_281_167


def recipe(file, name):
    return load_recipe(f"{CONFIGS / file}.py:{name}")


@pytest.mark.parametrize(
    ("name", "millions", "tokens"), [("s16_softmax", 22, 197), ("l16_softmax", 305, 197), ("l8_softmax", 305, 785)]
)
def test_the_papers_models_have_the_papers_sizes(name, millions, tokens):
    """Counted on the meta device, without the fixed positions: 22M, 305M and 305M in the paper."""
    shape = recipe("imagenet", name).shape
    with torch.device("meta"):
        model = shape.build()
    learned = sum(value.numel() for value in model.parameters() if value.requires_grad)
    d, layers, mlp, patch = shape.hidden, shape.layers, shape.mlp, shape.patch
    block = 4 * d * (d + 1) + d * mlp + mlp + mlp * d + d + 4 * d
    by_hand = layers * block + patch**2 * 3 * d + d + d + 2 * d + d * (d + 1) + 1000 * (d + 1)
    assert learned == by_hand
    assert round(learned / 1e6) == millions
    assert shape.tokens == tokens
    assert model.vit.embeddings.position_embeddings.shape == (1, tokens, d)


def test_the_papers_hyperparameters():
    made = recipe("imagenet", "l16_leverage_64")
    assert (made.epochs, made.batch, made.lr, made.warmup, made.clip) == (90, 1024, 1e-3, 10_000, 1.0)
    # big_vision takes 1e-4 of a weight away at the highest rate.
    assert made.lr * made.weight_decay == pytest.approx(1e-4)
    assert (made.augment.mixup, made.augment.randaug_layers, made.augment.randaug_magnitude) == (0.2, 2, 10)
    assert made.selection == Selection("leverage", 64)
    steps = made.steps(IMAGES)
    assert steps == round(90 * IMAGES / 1024)
    assert made.warm_steps(steps) == round(0.15 * steps)
    assert recipe("imagenet", "s16_leverage_32").warm_start == 0
    rates = [made.learning_rate(step, steps) for step in (0, 9_999, 10_000, (steps + 10_000) // 2, steps - 1)]
    assert rates == pytest.approx([1e-7, 1e-3, 1e-3, 5e-4, 0], abs=1e-8)


def rows(file):
    names = [
        line[4:-13] for line in (CONFIGS / f"{file}.py").read_text().splitlines() if line.endswith("() -> Recipe:")
    ]
    return {name: recipe(file, name) for name in names}


@pytest.mark.parametrize(("file", "count"), [("imagenet", 17), ("cifar", 16), ("fashion_tiny", 2)])
def test_every_row_is_another_recipe_and_says_how_it_is_run(file, count):
    made = rows(file)
    assert len(made) == count
    assert len({str(one.as_dict()) for one in made.values()}) == count
    text = (CONFIGS / f"{file}.py").read_text()
    for name, one in made.items():
        assert isinstance(one, Recipe)
        assert one.selection is None or name.endswith(f"_{one.selection.top_k}")
        assert f"{file}.py:{name} " in text or file == "cifar"
    if file == "cifar":
        assert {one.shape.tokens for one in made.values()} == {197, 785}


def test_random_positions_stay_and_differ_by_layer_and_head():
    model = Shape(image=8, patch=2, channels=1, classes=2, hidden=12, layers=2, heads=2, mlp=16).build(0)
    selection = Selection("random", 4)
    apply_selection(model, selection)
    keys = torch.randn(3, 2, 17, 6, generator=torch.Generator().manual_seed(0))
    seen = [tuple(selection.scorer(layer)(keys)[0, head].topk(4).indices.sort().values.tolist())
            for layer in range(2) for head in range(2)]  # fmt: skip
    again = [tuple(selection.scorer(layer)(2 * keys)[2, head].topk(4).indices.sort().values.tolist())
             for layer in range(2) for head in range(2)]  # fmt: skip
    assert seen == again
    assert len(set(seen)) == 4


def test_sine_positions_by_hand():
    found = sine_positions(3, 8)
    assert found.shape == (1, 10, 8)
    assert not found[0, 0].any()
    y, x = 1, 2
    for place, angle in ((0, x), (4, y)):
        for i, omega in enumerate((1.0, 1e-4)):
            assert float(found[0, 1 + 3 * y + x, place + i]) == pytest.approx(math.sin(angle * omega), abs=1e-6)
            assert float(found[0, 1 + 3 * y + x, place + 2 + i]) == pytest.approx(math.cos(angle * omega), abs=1e-6)


def test_shapes_and_recipes_that_do_not_fit():
    good = {"image": 8, "patch": 2, "channels": 1, "classes": 2, "hidden": 12, "layers": 2, "heads": 2, "mlp": 16}
    for wrong in ({"patch": 3}, {"heads": 5}, {"positions": "cosine"}, {"positions": "sincos", "hidden": 18}):
        with pytest.raises(ValueError, match="shape: expected"):
            Shape(**good | wrong)
    base = {"mean": (0.5,), "std": (0.5,), "epochs": 1, "batch": 4, "lr": 0.1, "weight_decay": 0.0, "warmup": 0}
    for wrong in ({"epochs": 0}, {"warm_start": 1.0}, {"warmup": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Recipe(shape=Shape(**good), **base | wrong)
