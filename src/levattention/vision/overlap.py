"""How many of the important keys a model's heads would choose: U against the largest W_j, by layer and head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from levattention.integrations.huggingface import attention_modules
from levattention.local import positions
from levattention.scorers import Leverage
from levattention.universal import universal_set
from levattention.vision.layout import RADIUS, layout
from levattention.vision.selection import Selection
from levattention.vision.structure import TOP, masses


@torch.no_grad()
def overlap(model: Any, pixels: Tensor, selection: Selection | None = None) -> Tensor:
    """Mean share of the 32 important keys that lie in U, (layers, heads).

    U is what the selection chooses (for None, the 32 keys of the largest leverage). Important are the keys that would
    get most from queries not near them if all keys were seen: under a selection the others get nothing, and the
    overlap would be 1 by definition. Queries and keys are those of the model as it attends.

    Args:
        model: a transformers ViT.
        pixels: (B, channels, h, w), as the model takes them.
        selection: how keys are chosen; a residual is left aside.
    """
    top = TOP if selection is None else selection.top_k
    found: list[Tensor] = []
    with _queries_and_keys(model) as held:
        model(pixel_values=pixels)
        for layer, module in enumerate(attention_modules(model)):
            queries, keys = (part.float() for part in held.pop(module))
            n = keys.shape[-2]
            here = positions(slice(0, n), keys.device)
            near = layout(model).grid(RADIUS).near(here, here)
            weights = (queries @ keys.mT * keys.shape[-1] ** -0.5).softmax(-1)
            important = masses(weights, near, min(TOP, n)).important
            scorer = Leverage() if selection is None else selection.scorer(layer)
            chosen = universal_set(keys, k=min(top, n), scorer=scorer).mask(n)
            found.append((important & chosen).double().sum(-1).mean(0) / min(TOP, n))
    return torch.stack(found).cpu()


@contextmanager
def _queries_and_keys(model: nn.Module) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """By attention module, what its last forward pass projected: queries and keys, (B, H, n, d) each."""
    held: dict[nn.Module, list[Tensor]] = {}
    hooks = []
    try:
        for module in attention_modules(model):
            held[module] = []
            parts: tuple[Any, Any] = (module.q_proj, module.k_proj)
            for part in parts:

                def keep(_: Any, __: Any, out: Tensor, module: Any = module) -> None:
                    held[module].append(out.unflatten(-1, (-1, module.head_dim)).transpose(1, 2))

                hooks.append(part.register_forward_hook(keep))
        yield held
    finally:
        for hook in hooks:
            hook.remove()
