"""The models and images that come with the package: small, and as right as their records say."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")

from levattention.vision import Selection, read_checkpoint
from levattention.vision.embedded import ASSETS, IMAGES, MODELS, embedded_images, embedded_models
from levattention.vision.evaluate import rank


def test_sizes():
    assert (ASSETS / IMAGES).stat().st_size <= 600_000
    assert all((ASSETS / file).stat().st_size <= 6_000_000 for file in MODELS.values())


def test_the_images_are_balanced_and_show_all_classes_soon():
    images = embedded_images()
    assert images.labels.bincount().tolist() == [100] * 10
    assert images[0][0].shape == (1, 28, 28)
    assert images.classes[0] == "T-shirt"
    assert embedded_images(10).labels.tolist() == list(range(10))
    assert len({image.numpy().tobytes() for image, _ in images}) > 990


def test_the_models_are_the_papers_geometry_trained_as_they_say():
    softmax, leverage = (model for _, model, _ in embedded_models())
    for model in (softmax, leverage):
        config = model.config
        assert (config.num_hidden_layers, config.num_attention_heads) == (6, 6)
        assert model.vit.embeddings.position_embeddings.shape[1] == 197
    assert softmax.selection is None
    assert leverage.selection == Selection("leverage", 32)
    recipes = [read_checkpoint(ASSETS / file)["recipe"] for file in MODELS.values()]
    differing = {name for name in recipes[0] if recipes[0][name] != recipes[1][name]}
    assert differing == {"selection", "warm_start"}


@pytest.mark.parametrize("which", [0, 1])
def test_accuracy_is_the_recorded_one(which):
    """On the packed images, up to 3 of 1,000 that another CPU's rounding may move over the fence."""
    name, model, preprocess = embedded_models()[which]
    about = read_checkpoint(ASSETS / MODELS[name])
    ranked, labels, _ = rank(model, embedded_images(), preprocess, 50)
    right = int((ranked[:, 0] == labels).sum())
    assert abs(right - about["right_of_1000"]) <= 3
    # The packed images are drawn from the test set: five standard deviations of a sample apart at most.
    share = about["right_of_10000"] / 10_000
    assert abs(right / 1000 - share) < 5 * (share * (1 - share) / 1000) ** 0.5
    assert share > 0.8
