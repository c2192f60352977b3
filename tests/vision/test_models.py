"""Models from every source compute what they computed before, and images reach them as they should."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")

import numpy as np
from PIL import Image
from safetensors.torch import save_file

from levattention.vision import Preprocess, Selection, Shape, load_vit, read_checkpoint, save_vit, vit_from_timm
from levattention.vision.images import ArrayImages

TINY = Shape(image=8, patch=2, channels=1, classes=3, hidden=12, layers=2, heads=2, mlp=16)
GREY = Preprocess((0.25,), (0.5,), 8, 1)


@pytest.fixture
def pixels(generator):
    return torch.randn(5, 1, 8, 8, generator=generator)


def built(shape=TINY):
    """A model whose classifier is not the zeros it starts from."""
    model = shape.build(0).eval()
    torch.nn.init.normal_(list(model.classifier.parameters())[-2], generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("shape", [TINY, Shape(**vars(TINY) | {"pre_logits": True, "positions": "sincos"})])
@pytest.mark.parametrize("selection", [None, Selection("random", 5, seed=3), Selection("norm", 4, local=1)])
def test_a_checkpoint_comes_back_with_its_attention(tmp_path, pixels, shape, selection):
    model = built(shape)
    if selection is not None:
        selection.apply(model)
    for half, tolerance in ((False, 0), (True, 0.02)):
        path = tmp_path / f"{half}.safetensors"
        save_vit(path, model, GREY, selection=selection, classes=("a", "b", "c"), half=half, step=7)
        back, preprocess = load_vit(path)
        assert preprocess == GREY
        assert back.selection == selection
        assert not back.training
        assert {value.dtype for value in back.parameters()} == {torch.float32}
        with torch.no_grad():
            want, got = (one(pixel_values=pixels).logits for one in (model, back))
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    about = read_checkpoint(path)
    assert about["classes"] == ["a", "b", "c"]
    assert about["step"] == 7
    # Other positions than those of the seed give other logits, so the selection did matter above.
    if selection is not None and selection.by == "random":
        with torch.no_grad():
            other = Selection("random", 5, seed=4).apply(back)(pixel_values=pixels).logits
        assert not torch.allclose(other, want, atol=0.02)


def test_a_folder_with_a_checkpoint(tmp_path, pixels):
    model = built()
    save_vit(tmp_path / "model.safetensors", model, GREY, half=False)
    back, _ = load_vit(tmp_path)
    with torch.no_grad():
        assert torch.equal(back(pixel_values=pixels).logits, model(pixel_values=pixels).logits)
    assert read_checkpoint(tmp_path)["selection"] is None
    # As readable as any other file of the user.
    (tmp_path / "plain").touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_hugging_face_folder(tmp_path, pixels):
    model = built()
    model.save_pretrained(tmp_path)
    back, preprocess = load_vit(tmp_path)
    with torch.no_grad():
        assert torch.equal(back(pixel_values=pixels).logits, model(pixel_values=pixels).logits)
    assert (preprocess.size, preprocess.channels) == (8, 1)
    processor = {"image_processor_type": "ViTImageProcessor", "image_mean": [0.5], "image_std": [0.25]}
    processor["size"] = {"shortest_edge": 10}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    assert load_vit(tmp_path)[1] == Preprocess((0.5,), (0.25,), 8, 1, 0.8)


def test_timms_file(tmp_path, pixels):
    generator = torch.Generator().manual_seed(0)
    held = {
        "cls_token": torch.zeros(1, 1, 64), "pos_embed": torch.zeros(1, 17, 64),
        "patch_embed.proj.weight": torch.randn(64, 1, 2, 2, generator=generator),
        "patch_embed.proj.bias": torch.zeros(64), "norm.weight": torch.ones(64), "norm.bias": torch.zeros(64),
        "head.weight": torch.randn(3, 64, generator=generator), "head.bias": torch.zeros(3),
    }  # fmt: skip
    for name, (rows, columns) in {"attn.qkv": (192, 64), "attn.proj": (64, 64), "mlp.fc1": (8, 64)}.items():
        held[f"blocks.0.{name}.weight"] = torch.randn(rows, columns, generator=generator)
        held[f"blocks.0.{name}.bias"] = torch.zeros(rows)
    held |= {"blocks.0.mlp.fc2.weight": torch.ones(64, 8), "blocks.0.mlp.fc2.bias": torch.zeros(64)}
    held |= {f"blocks.0.norm{i}.weight": torch.ones(64) for i in (1, 2)}
    held |= {f"blocks.0.norm{i}.bias": torch.zeros(64) for i in (1, 2)}
    save_file(held, tmp_path / "vit.safetensors")
    model, preprocess = load_vit(tmp_path / "vit.safetensors")
    with torch.no_grad():
        assert torch.equal(model(pixel_values=pixels).logits, vit_from_timm(held)(pixel_values=pixels).logits)
    assert preprocess == Preprocess((0.485,), (0.229,), 8, 1)
    assert model.selection is None


def test_sources_that_are_no_models(tmp_path):
    with pytest.raises(ValueError, match="there is no such file or folder"):
        load_vit(tmp_path / "no.safetensors")
    with pytest.raises(ValueError, match=r"expected model\.safetensors of ours"):
        load_vit(tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a readable"):
        load_vit(tmp_path / "bad.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="expected a timm ViT"):
        load_vit(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="expected a checkpoint of levattention"):
        read_checkpoint(tmp_path / "x.safetensors")
    for wrong in ({"by": "leverge"}, {"top_k": 0}, {"residual": "mean"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Selection(**wrong)


def test_preprocess_normalises_each_channel():
    images = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    images[:, 1], images[:, 2] = 255, 51
    prepared = Preprocess((0.5, 0.5, 0.1), (0.5, 0.25, 0.1), 2)(images)
    torch.testing.assert_close(prepared[0, :, 0, 0], torch.tensor([-1.0, 2.0, 1.0]))
    assert prepared.dtype == torch.float32
    with pytest.raises(ValueError, match="expected uint8"):
        GREY(images.float())
    with pytest.raises(ValueError, match="expected 3 numbers"):
        Preprocess((0.5,), (0.5,), 2)


def test_preprocess_changes_size_and_colour_as_pillow_does():
    colour = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    image = torch.from_numpy(colour).permute(2, 0, 1).unsqueeze(0)
    grey = np.asarray(Image.fromarray(colour).convert("L"), dtype=int)
    got = Preprocess((0.0,), (1.0,), 40, 1).fit(image)[0, 0].numpy().astype(int)
    # Pillow rounds the weights of the channels to 16 bits.
    assert np.abs(got - grey[:, 10:50]).max() <= 1
    small = np.asarray(Image.fromarray(colour).resize((30, 20), Image.Resampling.BICUBIC), dtype=int)
    got = Preprocess((0.0,) * 3, (1.0,) * 3, 16, 3, crop=0.8).fit(image)[0].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(got - small[2:18, 7:23]).max() <= 1
    three = Preprocess((0.0,) * 3, (1.0,) * 3, 40).fit(image[:, :1, :, :40])
    assert torch.equal(three, image[:, :1, :, :40].expand(-1, 3, -1, -1))


def test_batches_hold_every_image_once_in_order():
    pixels = torch.arange(7, dtype=torch.uint8).view(7, 1, 1, 1).expand(7, 1, 8, 8)
    found = list(GREY.batches(ArrayImages("seven", pixels, torch.arange(7)), 3))
    assert [labels.tolist() for _, labels in found] == [[0, 1, 2], [3, 4, 5], [6]]
    got = torch.cat([values for values, _ in found])[:, 0, 0, 0]
    torch.testing.assert_close(got, (torch.arange(7) / 255 - 0.25) / 0.5)
