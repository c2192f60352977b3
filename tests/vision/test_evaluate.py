"""The inference table: counted by hand, and against masks written out."""

import json

import pytest
import torch
from statsmodels.stats.proportion import proportion_confint
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("transformers", reason="transformers is not installed")

import dense
from levattention.vision.evaluate import evaluate, wilson
from levattention.vision.images import ArrayImages
from levattention.vision.results import load_evaluation, markdown, save_evaluation
from levattention.vision.selectors import TITLES, selection, title
from tiny_models import PREPARE, some_images, tiny_vit


def constant_vit(order):
    """A model that ranks the classes the same way for every image, best first."""
    model = tiny_vit()
    torch.nn.init.zeros_(model.classifier.weight)
    with torch.no_grad():
        model.classifier.bias[list(order)] = torch.arange(len(order), 0, -1).float()
    return model


def labelled(labels):
    images = some_images(len(labels))
    return ArrayImages("noise", images.pixels, torch.tensor(labels))


def test_a_table_counted_by_hand():
    """Ranked 3 1 0 2 5 | 4 6: top-1 counts the 3s, top-5 all but the 4s and 6s."""
    images = labelled([3, 3, 4, 1, 3, 6, 0, 3, 3, 4])
    rows = list(
        evaluate(constant_vit([3, 1, 0, 2, 5, 4, 6]), images, PREPARE, selectors=["norm"], budgets=[4, 9], batch=3)
    )
    assert [(row["method"], row["top_k"]) for row in rows] == [("full", None), ("norm", 4), ("norm", 9)]
    for row in rows:
        assert (row["images"], row["top1"], row["top5"]) == (10, 0.5, 0.7)
        assert (row["first"], row["last"], row["agree"]) == (0.6, 0.4, 1.0)
        assert row["top1_interval"] == pytest.approx(proportion_confint(5, 10, method="wilson"))
        assert row["top5_interval"] == pytest.approx(proportion_confint(7, 10, method="wilson"))
        assert row["first_interval"] == pytest.approx(proportion_confint(3, 5, method="wilson"))
        assert row["images_per_second"] > 0
    assert "| full attention | all | 50.0 | 23.7–76.3 | 70.0 | 39.7–89.2 | 60.0 | 40.0 | 100.0 |" in markdown(rows)


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (0, 500), (500, 500), (428, 500), (3, 7)])
def test_wilson_is_statsmodels(successes, trials):
    low, high = wilson(successes, trials)
    assert (low, high) == pytest.approx(proportion_confint(successes, trials, method="wilson"), abs=1e-12)
    assert 0 <= low <= successes / trials <= high <= 1


def written_out(model, pixels, chosen):
    """The logits of a tiny ViT whose heads see the chosen keys alone: `chosen(keys, layer, head)` are positions."""
    vit = model.vit
    x = vit.embeddings(pixels)
    for index, layer in enumerate(vit.layers):
        normed, attention = layer.layernorm_before(x), layer.attention
        q, k, v = (
            projection(normed).unflatten(-1, (2, 8)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        seen = torch.zeros(*k.shape[:-1], dtype=torch.bool)
        for image in range(len(k)):
            for head in range(2):
                seen[image, head, chosen(k[image, head].double(), index, head)] = True
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(-2))
        x = x + attention.o_proj(out.transpose(1, 2).flatten(-2))
        x = x + layer.mlp(layer.layernorm_after(x))
    return model.classifier(vit.layernorm(x)[:, 0])


@pytest.mark.parametrize("name", ["leverage", "norm"])
def test_a_row_is_that_of_the_model_written_out(name):
    """Labels are what the written-out model says for the even images, and something else for the odd ones."""

    def chosen(keys, layer, head):
        return dense.best(dense.leverage(keys, 4 * 2.0**-23) if name == "leverage" else keys.square().sum(-1), 6)

    model, pixels = tiny_vit(4), PREPARE(some_images(24, seed=5).pixels)
    with torch.no_grad():
        said = written_out(model, pixels, chosen).argmax(-1)
        full = model(pixel_values=pixels).logits.argmax(-1)
    labels = torch.where(torch.arange(24) % 2 == 0, said, (said + 1) % 7)
    images = ArrayImages("noise", some_images(24, seed=5).pixels, labels)
    first, row = evaluate(model, images, PREPARE, selectors=[name], budgets=[6], batch=7)
    assert row["top1"] == 0.5
    assert row["agree"] == float((said == full).double().mean())
    assert first["top1"] == float((full == labels).double().mean())
    # The case is sharp: it tells the selection from full attention.
    assert row["agree"] < 1


def test_a_budget_of_all_tokens_is_full_attention():
    model, images = tiny_vit(1), some_images(6)
    rows = list(evaluate(model, images, PREPARE, selectors=["leverage", "cluster", "lewis-1"], budgets=[37, 400]))
    assert all(row["agree"] == 1 and row["top1"] == rows[0]["top1"] for row in rows)
    assert model.config._attn_implementation == "sdpa"


def test_every_selector_runs_and_draws_differ_by_seed():
    model, images = tiny_vit(2), some_images(8)
    rows = list(evaluate(model, images, PREPARE, budgets=[5]))
    assert [row["method"] for row in rows] == ["full", *TITLES]
    again = list(evaluate(model, images, PREPARE, budgets=[5]))
    assert [{**row, "images_per_second": 0} for row in again] == [{**row, "images_per_second": 0} for row in rows]
    assert selection("random", 5, seed=1).scorer(0) != selection("random", 5, seed=0).scorer(0)
    assert selection("random", 5).scorer(1) != selection("random", 5).scorer(0)


def test_known_rows_come_back_as_they_are(tmp_path):
    images, settings = labelled([0, 1, 2, 3]), {"model": "m", "seed": 0}
    model, told = tiny_vit(), []
    rows = list(evaluate(model, images, PREPARE, selectors=["norm"], budgets=[4]))
    rows[1]["top1"] = 0.123
    save_evaluation(tmp_path, settings, rows)
    held = load_evaluation(tmp_path, settings)
    assert held == rows
    seen = list(evaluate(model, images, PREPARE, selectors=["norm"], budgets=[4, 8], done=held, advance=told.append))
    assert [(row["method"], row["top_k"]) for row in seen] == [("full", None), ("norm", 4), ("norm", 8)]
    assert seen[1] == rows[1]
    assert sum(told) == 3 * 4
    with pytest.raises(ValueError, match="made with another seed"):
        load_evaluation(tmp_path, {**settings, "seed": 1})
    (tmp_path / "eval.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="expected the results of an earlier run"):
        load_evaluation(tmp_path, settings)
    assert load_evaluation(tmp_path / "none", settings) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"selectors": ["best"]}, "selector: expected one of leverage, norm, random"),
        ({"selectors": ["lewis-0.5"]}, "lewis-P with P >= 1, got 'lewis-0.5'"),
        ({"selectors": ["lewis-x"]}, "got 'lewis-x'"),
        ({"budgets": [0]}, "expected integers of at least 1"),
        ({"budgets": []}, "expected integers of at least 1"),
        ({"batch": 0}, "expected integers of at least 1"),
    ],
)
def test_impossible_tables(changed, message):
    with pytest.raises(ValueError, match=message):
        evaluate(tiny_vit(), some_images(2), PREPARE, **changed)


def test_labels_the_model_does_not_have():
    with pytest.raises(ValueError, match="expected labels 0 to 6 for this model, got 9"):
        evaluate(tiny_vit(), labelled([1, 9]), PREPARE)


def test_titles():
    assert title("lewis-1") == "Lewis, p = 1"
    assert title("lewis-2.5") == "Lewis, p = 2.5"
