"""LevAttention, the module: multi-head self-attention over universal keys, with timm's parameter names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from levattention.attention import BLOCK, attend
from levattention.local import Grid
from levattention.residuals import Residual
from levattention.scorers import Scorer


class LevAttention(nn.Module):
    """Self-attention in which each head sees its `top_k` universal keys: (B, n, dim) -> (B, n, dim).

    The state dict is that of timm's `Attention` (qkv, proj, and q_norm, k_norm where used), so weights move both
    ways. Nothing random is stored: the positions of the `Random` scorer come from its seed.

    Args:
        dim: width of the tokens.
        num_heads: a divisor of dim.
        top_k: budget of keys a head. Exactly one of top_k and eps; top_k=None with eps.
        eps: threshold of the scores.
        scorer: see `attend`.
        residual: see `attend`.
        window: see `attend`.
        is_causal: whether token i sees tokens up to i only.
        chunk: queries in a causal chunk.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        qk_norm: whether queries and keys pass through `norm_layer(head_dim)`.
        proj_bias: whether the output projection has a bias.
        attn_drop: dropout of the attention weights, in training.
        proj_drop: dropout of the output, in training.
        norm_layer: for qk_norm; `nn.LayerNorm` by default.
        device: where the parameters live.
        dtype: of the parameters.

    Example:
        >>> LevAttention(64, 4, top_k=8)(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        top_k: int | None = 32,
        eps: float | None = None,
        scorer: Scorer | None = None,
        residual: Residual | None = None,
        window: int | Grid = 0,
        is_causal: bool = False,
        chunk: int = BLOCK,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(f"dim: expected a positive multiple of num_heads = {num_heads}, got {dim}")
        if (top_k is None) == (eps is None):
            raise ValueError(f"expected exactly one of top_k and eps, got top_k={top_k} and eps={eps}")
        self.num_heads = num_heads
        self.options: dict[str, Any] = {
            "top_k": top_k,
            "eps": eps,
            "scorer": scorer,
            "residual": residual,
            "window": window,
            "chunk": chunk,
        }
        self.is_causal = is_causal
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        norm = nn.LayerNorm if norm_layer is None else norm_layer
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **made)
        self.q_norm = norm(dim // num_heads, **made) if qk_norm else nn.Identity()
        self.k_norm = norm(dim // num_heads, **made) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **made)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Attended tokens.

        Args:
            x: (B, n, dim).
            key_mask: True for tokens that may be seen, (B, n) or (B, 1 or heads, n).
        """
        if x.ndim != 3 or x.shape[-1] != self.qkv.in_features:
            raise ValueError(f"x: expected (B, n, {self.qkv.in_features}), got {tuple(x.shape)}")
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = attend(
            self.q_norm(q).to(v.dtype),
            self.k_norm(k).to(v.dtype),
            v,
            key_mask=key_mask,
            is_causal=self.is_causal,
            dropout_p=self.attn_drop.p if self.training else 0.0,
            **self.options,
        )
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(-2)))

    def extra_repr(self) -> str:
        """The options that differ from leaving light keys out."""
        shown = {name: value for name, value in self.options.items() if value not in (None, 0, BLOCK)}
        return ", ".join(f"{name}={value}" for name, value in {"num_heads": self.num_heads, **shown}.items())
