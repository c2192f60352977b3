"""The real DeiT-Ti/16 on real images, where they are at hand: `shared/data` beside the checkout or above it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import conv2d, gelu, layer_norm, linear, scaled_dot_product_attention

import dense
import levattention as la
from levattention.integrations.huggingface import use_full_attention, use_lev_attention
from levattention.vision import labelled_images, vit_from_timm

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")

FOUND = [up / "shared" / "data" for up in Path(__file__).resolve().parents if (up / "shared" / "data" / "vit").is_dir()]
real = pytest.mark.skipif(not FOUND, reason="no shared/data beside the checkout: DeiT-Ti and its images are missing")


@pytest.fixture(scope="module")
def weights():
    from safetensors.torch import load_file

    held = load_file(FOUND[0] / "vit" / "deit_tiny_patch16_224.safetensors")
    return {name: value.float() for name, value in held.items()}


@pytest.fixture(scope="module")
def images():
    return labelled_images(FOUND[0] / "imagenet-dev", 32)


def plain_vit(weights, pixels, heads, attention):
    """A vision transformer by timm's parameter names, written out."""
    dim = weights["cls_token"].shape[-1]
    patches = conv2d(pixels, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=16)
    x = torch.cat([weights["cls_token"].expand(len(pixels), -1, -1), patches.flatten(2).mT], 1) + weights["pos_embed"]

    def norm(x, name):
        return layer_norm(x, (dim,), weights[name + ".weight"], weights[name + ".bias"], 1e-6)

    def dense_layer(x, name):
        return linear(x, weights[name + ".weight"], weights[name + ".bias"])

    for block in range(1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks"))):
        name = f"blocks.{block}."
        qkv = dense_layer(norm(x, name + "norm1"), name + "attn.qkv")
        q, k, v = qkv.reshape(*x.shape[:2], 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
        x = x + dense_layer(attention(q, k, v).transpose(1, 2).flatten(-2), name + "attn.proj")
        x = x + dense_layer(gelu(dense_layer(norm(x, name + "norm2"), name + "mlp.fc1")), name + "mlp.fc2")
    return dense_layer(norm(x, "norm")[:, 0], "head")


@real
def test_the_loaded_model_is_deit_and_right_about_most_images(weights, images):
    """86 % of 32 images with one standard deviation of 6.2: 60 % is missed with probability 2e-4, were they new."""
    pixels, labels = images
    model = vit_from_timm(weights)
    with torch.no_grad():
        logits = model(pixel_values=pixels).logits
        want = plain_vit(weights, pixels[:4], 3, scaled_dot_product_attention)
    torch.testing.assert_close(logits[:4], want, rtol=1e-4, atol=1e-4)
    assert (logits.argmax(-1) == labels).double().mean() > 0.6


@real
@pytest.mark.parametrize("scorer", [la.scorers.Leverage(), la.scorers.Norm()])
def test_the_chosen_keys_alone_are_seen(weights, images, scorer):
    """The logits of LevAttention on real keys equal those of the written-out model under an explicit mask."""
    pixels = images[0][:2]

    def masked(q, k, v):
        seen = torch.zeros(*k.shape[:-1], dtype=torch.bool)
        for i in range(len(k)):
            for j in range(k.shape[1]):
                wide = k[i, j].double()
                scores = dense.leverage(wide, 4 * 2.0**-23) if scorer.certified else wide.square().sum(-1)
                seen[i, j, dense.best(scores, 32)] = True
        return scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(-2))

    model = use_lev_attention(vit_from_timm(weights), top_k=32, scorer=scorer)
    with torch.no_grad():
        got, want = model(pixel_values=pixels).logits, plain_vit(weights, pixels, 3, masked)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@real
def test_clusters_keep_more_of_the_model_than_the_heavy_keys_alone(weights, images):
    """Of the predictions of full attention on 500 images at k = 32 about 80 % are kept, and 23 % by the keys alone."""
    model, pixels = vit_from_timm(weights), images[0][:16]
    agree = {}
    with torch.inference_mode():
        full = model(pixel_values=pixels).logits
        for residual in (la.residuals.Drop(), la.residuals.Cluster()):
            use_lev_attention(model, top_k=32, residual=residual)
            kept = model(pixel_values=pixels).logits.argmax(-1) == full.argmax(-1)
            agree[type(residual).__name__] = float(kept.double().mean())
        assert torch.equal(use_full_attention(model)(pixel_values=pixels).logits, full)
    assert agree["Cluster"] > agree["Drop"] + 0.2


def test_a_small_vit_with_timms_names():
    generator = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    held = {
        "cls_token": some(1, 1, 24), "pos_embed": some(1, 10, 24),
        "patch_embed.proj.weight": some(24, 3, 16, 16) * 0.1, "patch_embed.proj.bias": some(24),
        "norm.weight": some(24), "norm.bias": some(24), "head.weight": some(7, 24), "head.bias": some(7),
    }  # fmt: skip
    for block in range(2):
        for name, rows, columns in (
            ("attn.qkv", 72, 24),
            ("attn.proj", 24, 24),
            ("mlp.fc1", 32, 24),
            ("mlp.fc2", 24, 32),
        ):
            held[f"blocks.{block}.{name}.weight"], held[f"blocks.{block}.{name}.bias"] = some(rows, columns), some(rows)
        for name in ("norm1", "norm2"):
            held[f"blocks.{block}.{name}.weight"], held[f"blocks.{block}.{name}.bias"] = some(24), some(24)
    pixels = torch.randn(2, 3, 48, 48, generator=generator)
    model = vit_from_timm(held, num_heads=3)
    want = plain_vit(held, pixels, 3, scaled_dot_product_attention)
    torch.testing.assert_close(model(pixel_values=pixels).logits, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="left over"):
        vit_from_timm({**held, "head_dist.weight": some(7, 24)}, num_heads=3)
    del held["cls_token"]
    with pytest.raises(ValueError, match=r"got one without \['cls_token'\]"):
        vit_from_timm(held)


def test_images_say_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"labels\.csv"):
        labelled_images(tmp_path)
    (tmp_path / "labels.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns file and label"):
        labelled_images(tmp_path)
