"""Hugging Face models: `use_lev_attention(model, top_k=32)`, undone by `use_full_attention(model)`.

Both the attention and the mask function are registered with transformers: a name without a mask function gets no mask
at all, and with it goes causality. The options live on the model's own attention modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from levattention.arguments import require_choice, require_residual
from levattention.attention import BLOCK, attend
from levattention.integrations.masks import compact_mask, read_mask
from levattention.local import Grid
from levattention.residuals import Drop, Residual
from levattention.scorers import Scorer

__all__ = ["use_full_attention", "use_lev_attention"]

NAME = "levattention"

# What some models add to attention that this one has no place for.
UNSUPPORTED = ("position_bias", "softcap", "s_aux", "cache", "head_mask")


def use_lev_attention(
    model: nn.Module,
    *,
    top_k: int | None = 32,
    eps: float | None = None,
    scorer: Scorer | None = None,
    residual: Residual | None = None,
    window: int | Grid = 0,
    chunk: int = BLOCK,
    layers: Mapping[int, Mapping[str, Any] | None] | None = None,
) -> nn.Module:
    """The model itself, in which every attention layer now sees universal keys only.

    Encoders (ViT, DeiT, DINOv2, BERT) and decoders (Llama, Qwen) of transformers that go through its
    `AttentionInterface`; padding and grouped queries as in the model. In `generate()` each step chooses keys from the
    whole cache anew: right, but it saves neither time nor memory; the cache keeps every key.

    Args:
        model: a transformers `PreTrainedModel`.
        top_k: budget of keys a head. Layers that see no more keys than that use full attention, exactly.
        eps: threshold instead of top_k, with top_k=None.
        scorer: see `levattention.attend`; likewise the rest.
        residual: what stands for the light keys. Decoders take `Drop` alone.
        window: local keys, an int or a `Grid`.
        chunk: queries in a causal chunk.
        layers: options of single layers, by number in order of appearance: they override those above, and None
            leaves a layer with full attention.

    Raises:
        ValueError: a model whose attention does not go through the interface, a layer number that does not exist, or
            options that do not fit together.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> model = ViTForImageClassification(ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=2))
        >>> model = use_lev_attention(model, top_k=16, layers={0: None, 1: {"window": 2}})
        >>> model.config._attn_implementation
        'levattention'
    """
    modules = list(attention_modules(model))
    if not modules:
        raise ValueError(
            f"model: {type(model).__name__} has no attention that goes through transformers' AttentionInterface"
        )
    common = {"top_k": top_k, "eps": eps, "scorer": scorer, "residual": residual, "window": window, "chunk": chunk}
    single = dict(layers or {})
    unknown = sorted(set(single) - set(range(len(modules))))
    if unknown:
        raise ValueError(f"layers: the model has attention layers 0 to {len(modules) - 1}, got {unknown}")
    chosen = [_layer_options(common, single.get(i, {})) for i in range(len(modules))]
    for module, options in zip(modules, chosen, strict=True):
        if options is not None and getattr(module, "is_causal", False):
            require_residual(options["residual"] or Drop(), None, options["eps"], True)

    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, lev_attention_forward)
    AttentionMaskInterface.register(NAME, compact_mask)
    if not hasattr(model, "_before_lev_attention"):
        model._before_lev_attention = implementations(model)  # type: ignore[assignment]
    for module, options in zip(modules, chosen, strict=True):
        module._lev_attention = options  # type: ignore[assignment]
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    return model


def use_full_attention(model: nn.Module) -> nn.Module:
    """The model itself, with the attention that it had before `use_lev_attention`; a no-op without one."""
    if hasattr(model, "_before_lev_attention"):
        model.set_attn_implementation(model._before_lev_attention)  # type: ignore[operator]
        del model._before_lev_attention
        for module in attention_modules(model):
            if hasattr(module, "_lev_attention"):
                del module._lev_attention
    return model


def lev_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(B, m, H, e) attention output, and None for the weights: the function that transformers calls.

    Raises:
        ValueError: a module without options, a mask or an extra that has no place here.
    """
    if not hasattr(module, "_lev_attention"):
        raise ValueError(
            f"{type(module).__name__} has no LevAttention options: call use_lev_attention(model) instead of setting "
            f"attn_implementation={NAME!r} by hand"
        )
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} passes {name}, which LevAttention does not support")
    m, n = query.shape[-2], key.shape[-2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    key_mask, causal = read_mask(attention_mask, m, n, bool(causal))
    options: Any = module._lev_attention
    out = attend(
        query,
        key,
        value,
        key_mask=key_mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=True,
        dropout_p=dropout,
        **({"top_k": n} if options is None else options),
    )
    return out.transpose(1, 2).contiguous(), None


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that ask transformers for an attention function, in order of appearance."""
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            yield module


def _layer_options(common: dict[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The options of one layer; None for full attention."""
    if own is None:
        return None
    unknown = sorted(set(own) - set(common))
    if unknown:
        raise ValueError(f"layers: expected options among {sorted(common)}, got {unknown}")
    merged = {**common, **own}
    if "eps" in own and "top_k" not in own:
        merged["top_k"] = None
    if "top_k" in own and "eps" not in own:
        merged["eps"] = None
    require_choice(merged["top_k"], merged["eps"], merged["scorer"], None, None)
    require_residual(merged["residual"] or Drop(), None, merged["eps"], False)
    return merged


def implementations(model: Any) -> str | dict[str, str]:
    """The attention implementation of a model, and those of its parts where it has some."""
    config = model.config
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    named = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **named} if named else config._attn_implementation
