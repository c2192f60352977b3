"""LevAttention, the module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import levattention as la
from levattention.integrations.timm import lev_attention_class


class Plain(nn.Module):
    """Multi-head self-attention with the parameter names that timm uses."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, dim = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, n, dim))


@pytest.fixture
def pair():
    torch.manual_seed(0)
    plain, ours = Plain(24, 3), la.LevAttention(24, 3, top_k=50)
    ours.load_state_dict(plain.state_dict())
    return plain, ours, torch.randn(2, 17, 24)


def test_weights_move_both_ways_and_enough_keys_is_full_attention(pair):
    plain, ours, x = pair
    torch.testing.assert_close(ours(x), plain(x))
    assert set(ours.state_dict()) == set(plain.state_dict())
    assert set(la.LevAttention(24, 3, scorer=la.scorers.Random(1)).state_dict()) == set(plain.state_dict())


def test_few_keys_equal_an_explicit_mask(pair):
    plain, ours, x = pair
    ours.options["top_k"] = 6
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[1, 12:] = False
    _, k, _ = plain.qkv(x).reshape(2, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
    seen = torch.zeros(2, 3, 17, dtype=torch.bool)
    for i, length in enumerate((17, 12)):
        seen[i, :, :length] = la.universal_set(k[i, :, :length], k=6).mask(length)
    torch.testing.assert_close(ours(x, key_mask=mask), plain(x, seen.unsqueeze(-2)))


def test_causal(pair):
    plain, ours, x = pair
    layer = la.LevAttention(24, 3, top_k=4, is_causal=True, chunk=17)
    layer.load_state_dict(ours.state_dict())
    torch.testing.assert_close(layer(x), plain(x, torch.ones(17, 17, dtype=torch.bool).tril()))


def test_trains():
    torch.manual_seed(0)
    layer = la.LevAttention(16, 2, top_k=4, residual=la.residuals.Cluster(), attn_drop=0.1, proj_drop=0.1)
    x, y = torch.randn(8, 20, 16), torch.randn(8, 20, 16)
    optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_qk_norm_half_precision_and_copies():
    layer = la.LevAttention(16, 2, top_k=4, qk_norm=True, dtype=torch.bfloat16)
    x = torch.randn(2, 9, 16, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert {"q_norm.weight", "k_norm.bias"} <= set(layer.state_dict())
    assert "top_k=4" in repr(layer)


def test_bad_input():
    with pytest.raises(ValueError, match="multiple of num_heads = 5"):
        la.LevAttention(24, 5)
    with pytest.raises(ValueError, match="exactly one of top_k and eps"):
        la.LevAttention(24, 3, top_k=4, eps=0.1)
    with pytest.raises(ValueError, match=r"expected \(B, n, 24\), got \(2, 5, 23\)"):
        la.LevAttention(24, 3)(torch.zeros(2, 5, 23))


def test_the_timm_class_is_a_class_with_timms_signature(pair):
    """timm itself asks `issubclass(attn_layer, nn.Module)` and builds the layer with these keywords."""
    plain, _, x = pair
    made = lev_attention_class(top_k=50)
    assert issubclass(made, nn.Module)
    layer = made(
        24, num_heads=3, qkv_bias=True, qk_norm=False, scale_norm=False, proj_bias=True, attn_drop=0.0,
        proj_drop=0.0, norm_layer=nn.LayerNorm, device=None, dtype=None,
    )  # fmt: skip
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer(x), plain(x))
    seen = torch.rand(2, 1, 1, 17) < 0.8
    torch.testing.assert_close(layer(x, attn_mask=seen), plain(x, seen))
    with pytest.raises(ValueError, match="for each query are not supported"):
        layer(x, attn_mask=torch.ones(2, 1, 17, 17, dtype=torch.bool))
    with pytest.raises(ValueError, match="is_causal"):
        layer(x, is_causal=True)
    with pytest.raises(ValueError, match="scale_norm=True"):
        made(24, num_heads=3, scale_norm=True)
    with pytest.raises(TypeError, match="top_q"):
        lev_attention_class(top_q=3)


def test_timm_models_take_the_class():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, attn_layer=lev_attention_class(top_k=5)
    )
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 1000)
