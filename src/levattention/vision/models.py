"""A vision transformer with timm's parameter names as transformers' ViT."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

# timm's name -> transformers' name, for what is not attention's qkv.
_RENAMED = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def vit_from_timm(source: str | Path | Mapping[str, Tensor], *, num_heads: int | None = None) -> Any:
    """transformers' `ViTForImageClassification` with the weights of a timm vision transformer, in fp32, for inference.

    Args:
        source: a state dict with timm's names, or the path of a safetensors file that holds one.
        num_heads: by default heads of width 64, as in every ViT-Ti, S, B and L.

    Raises:
        ValueError: a state dict of another architecture, naming what is missing or left over.
    """
    from transformers import ViTConfig, ViTForImageClassification

    if isinstance(source, Mapping):
        weights = dict(source)
    else:
        from safetensors.torch import load_file

        weights = load_file(source)
    needed = {"cls_token", "pos_embed", "patch_embed.proj.weight", "head.weight", "blocks.0.mlp.fc1.weight"}
    if missing := sorted(needed - set(weights)):
        raise ValueError(f"source: expected a timm ViT with a class token and a linear head, got one without {missing}")
    patch = weights["patch_embed.proj.weight"]
    dim, tokens = patch.shape[0], weights["pos_embed"].shape[1]
    side = math.isqrt(tokens - 1)
    if side * side != tokens - 1:
        raise ValueError(
            f"source: expected position embeddings of a class token and a square grid, got {tokens} tokens"
        )
    config = ViTConfig(
        hidden_size=dim,
        num_hidden_layers=1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks.")),
        num_attention_heads=max(1, dim // 64) if num_heads is None else num_heads,
        intermediate_size=weights["blocks.0.mlp.fc1.weight"].shape[0],
        image_size=side * patch.shape[-1],
        patch_size=patch.shape[-1],
        num_channels=patch.shape[1],
        num_labels=weights["head.weight"].shape[0],
        qkv_bias="blocks.0.attn.qkv.bias" in weights,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
    )
    model = ViTForImageClassification(config)
    renamed = {new: tensor.float() for name, value in weights.items() for new, tensor in _rename(name, value)}
    result = model.load_state_dict(renamed, strict=False)
    if result.missing_keys or result.unexpected_keys:
        raise ValueError(f"source: missing {result.missing_keys}, left over {result.unexpected_keys}")
    return model.eval()


def _rename(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """A timm entry under transformers' name; qkv as the three it holds."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    prefix, rest = (f"vit.layers.{block[1]}.", block[2]) if block else ("", name)
    stem, _, kind = rest.rpartition(".")
    if stem == "attn.qkv":
        parts = zip("qkv", value.chunk(3), strict=True)
        return [(f"{prefix}attention.{part}_proj.{kind}", tensor) for part, tensor in parts]
    if rest in _RENAMED:
        return [(_RENAMED[rest], value)]
    return [(f"{prefix}{_RENAMED.get(stem, stem)}.{kind}", value)]
