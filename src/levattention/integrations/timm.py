"""timm's vision transformers: `VisionTransformer(attn_layer=lev_attention_class(top_k=32))`.

timm itself is not imported: it asks for a class and builds it with its own keywords.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from levattention.nn import LevAttention


def lev_attention_class(**options: Any) -> type[LevAttention]:
    """A subclass of `LevAttention` with these options, to be given to timm as `attn_layer`.

    A class and not a `functools.partial`, because timm asks `issubclass`. Parameter names are those of timm's own
    `Attention`, so pretrained weights load.

    Args:
        options: of `LevAttention`: top_k, eps, scorer, residual, window, chunk.

    Example:
        >>> layer = lev_attention_class(top_k=8)(64, num_heads=4, qkv_bias=True, norm_layer=None)
        >>> sorted(name for name, _ in layer.named_parameters())
        ['proj.bias', 'proj.weight', 'qkv.bias', 'qkv.weight']
    """

    class TimmLevAttention(LevAttention):
        """`LevAttention` with the signature of timm's `Attention`."""

        def __init__(
            self,
            dim: int,
            num_heads: int = 8,
            attn_head_dim: int | None = None,
            dim_out: int | None = None,
            qkv_bias: bool = False,
            qk_norm: bool = False,
            scale_norm: bool = False,
            **rest: Any,
        ) -> None:
            if attn_head_dim not in (None, dim // num_heads) or dim_out not in (None, dim) or scale_norm:
                raise ValueError(
                    f"expected heads of dim / num_heads and no norm of the output, got attn_head_dim={attn_head_dim}, "
                    f"dim_out={dim_out}, scale_norm={scale_norm}"
                )
            super().__init__(dim, num_heads, qkv_bias=qkv_bias, qk_norm=qk_norm, **{**rest, **options})

        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            """Attended tokens; `attn_mask` may hide keys from all queries alike, and nothing else.

            Args:
                x: (B, n, dim).
                attn_mask: boolean, True for tokens that may be seen, (B, 1, 1, n) or (B, heads, 1, n).
                is_causal: must agree with the layer's own option.
            """
            if is_causal != self.is_causal:
                raise ValueError(f"is_causal: this layer was made with is_causal={self.is_causal}, got {is_causal}")
            if attn_mask is not None and (attn_mask.ndim != 4 or attn_mask.shape[-2] != 1):
                raise ValueError(
                    f"attn_mask: expected a mask of keys, (B, 1 or heads, 1, n), got {tuple(attn_mask.shape)}: "
                    "masks and biases for each query are not supported"
                )
            return super().forward(x, None if attn_mask is None else attn_mask.squeeze(-2))

    # Checked now rather than when timm builds the first block.
    TimmLevAttention(8, 1)
    return TimmLevAttention
