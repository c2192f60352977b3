"""A model's attention matrices, shown one layer at a time to whoever measures them, and then dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from levattention.arguments import require_choice
from levattention.integrations.huggingface import attention_modules, implementations
from levattention.local import as_window, positions
from levattention.residuals import Drop

NAME = "levattention-observed"

# Told of the layer, its weights (B, H, n, n), queries and keys (B, H, n, d).
See = Callable[[int, Tensor, Tensor, Tensor], None]


@contextmanager
def observing(model: Any, see: See) -> Iterator[Any]:
    """The model, each of whose layers tells `see` of its attention before it goes on. Nothing is kept.

    The attention is the one in force: over all keys, or what `use_lev_attention` left of them.

    Raises:
        ValueError: a layer with a residual, whose slots are no keys; from within, a mask.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    modules = list(attention_modules(model))
    for module in modules:
        options = getattr(module, "_lev_attention", None)
        if options is not None and not isinstance(options["residual"] or Drop(), Drop):
            raise ValueError(f"model: {type(options['residual']).__name__} attends to slots that are no keys")
    AttentionInterface.register(NAME, observed_forward)
    AttentionMaskInterface.register(NAME, eager_mask)
    before = implementations(model)
    try:
        for layer, module in enumerate(modules):
            module._observer = (layer, see)  # type: ignore[assignment]
        model.set_attn_implementation(NAME)
        yield model
    finally:
        model.set_attn_implementation(before)
        for module in modules:
            if hasattr(module, "_observer"):
                del module._observer


def observed_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(B, n, H, e) attention output: the function that transformers calls while a model is observed."""
    if attention_mask is not None or getattr(module, "is_causal", False):
        raise ValueError(f"model: {type(module).__name__} masks keys; expected a vision transformer")
    layer, see = module._observer  # type: ignore[misc]
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    seen = visible(getattr(module, "_lev_attention", None), key)
    weights = (logits if seen is None else logits.masked_fill(~seen, -torch.inf)).softmax(-1)
    see(layer, weights, query, key)
    return (weights @ value).transpose(1, 2).contiguous(), None


def visible(options: dict[str, Any] | None, keys: Tensor) -> Tensor | None:
    """Which keys each query sees under the options of `use_lev_attention`, (B, H, m or 1, n); None for all."""
    n = keys.shape[-2]
    if options is None or (options["top_k"] or 0) >= n:
        return None
    choice = require_choice(options["top_k"], options["eps"], options["scorer"], None, None)
    assert choice is not None  # there is no given set
    everywhere = torch.ones(keys.shape[:-1], dtype=torch.bool, device=keys.device)
    seen = choice(keys, everywhere).mask(n).unsqueeze(-2)
    window = as_window(options["window"], n, n)
    if window is not None:
        here = positions(slice(0, n), keys.device)
        seen = seen | window.near(here, here)
    return seen
