"""attend(q, k, v): attention over the universal keys, what stands for the light ones, and the local ones.

Three steps, each replaceable: choose keys (no gradients), turn them into weighted slots, attend to the slots. Local
keys, and the causal block of a chunk, are a second part; the parts are merged by the sums of their weights.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from levattention.arguments import (
    autocast,
    require_choice,
    require_mask,
    require_normaliser,
    require_residual,
    require_shapes,
    require_universal,
)
from levattention.causal import RunningSet, stack_sets
from levattention.head import BLOCK, Head
from levattention.local import Grid, as_window
from levattention.losses import Loss
from levattention.residuals import Drop, Residual
from levattention.scorers import Scorer
from levattention.select import everything, nothing
from levattention.universal import UniversalSet

__all__ = ["Grid", "attend"]


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, return_set: Literal[True], **options: Any
) -> tuple[Tensor, UniversalSet]: ...
@overload
def attend(q: Tensor, k: Tensor, v: Tensor, *, return_set: Literal[False] = False, **options: Any) -> Tensor: ...
def attend(  # type: ignore[misc]  # the overloads name only what decides the type of the result
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    top_k: int | None = None,
    eps: float | None = None,
    scorer: Scorer | None = None,
    residual: Residual | None = None,
    loss: Loss | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | Grid = 0,
    scale: float | None = None,
    enable_gqa: bool = False,
    normaliser: Literal["exact"] | None = None,
    universal: UniversalSet | None = None,
    return_set: bool = False,
    chunk: int = BLOCK,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, UniversalSet]:
    """Attention in which every query of a head sees the head's universal keys only, (*batch, m, e).

    softmax(scale·QK_Uᵀ)V_U, or D⁻¹f(scale·QK_Uᵀ)V_U with a loss f. U holds the top_k best keys under the scorer, or
    all that reach eps. Under f(x) = x² and leverage scores no key outside U can receive a weight of eps (for top_k,
    of the returned set's eps) from any query; for softmax the same choice carries no such guarantee.

    Shapes only are checked and no branch depends on values: a visible key that holds NaN is chosen on a CUDA device,
    and fails the factorisation on a CPU. Leverage is taken from the fp64 Gram, whatever the scorer's route. On a CUDA
    device top_k ranks keys by fp32 kernels instead, which may swap keys whose scores lie within the kernels' error
    (docs/gpu.md); a set that is returned is certified in fp64. A query that sees no key gives zeros.

    Args:
        q: (*batch, m, d), as for `scaled_dot_product_attention`: (B, H, m, d).
        k: (*batch, n, d); (B, H_kv, n, d) with enable_gqa, where each KV head is scored once.
        v: (*batch, n, e).
        top_k: budget of slots. From n on, full attention, exactly.
        eps: threshold in (0, 1]. Exactly one of top_k, eps and universal.
        scorer: what scores the keys; by default leverage, or the certified scorer of the loss.
        residual: what stands for the light keys: `Drop()` (the default, as in the paper), `Sample()` or `Cluster()`.
        loss: f; None for softmax.
        key_mask: True for keys that may be seen: (B, n), (B, 1, n) or (B, H_kv, n). The others enter neither the
            Gram nor U, and may hold anything.
        is_causal: query i sees keys up to i + n − m (aligned at the end, as in decoding): its own chunk's causal
            block, its window, and the universal set of the keys before the chunk.
        window: local keys seen besides U: those within an int's distance or a `Grid`'s; 0 for none. For m ≠ n
            aligned at the end.
        scale: by default 1/√d for softmax and 1 for a loss.
        enable_gqa: allow q a multiple of k's heads.
        normaliser: "exact" divides by the sum of f over all visible keys instead of those seen. Even powers: p = 2
            costs O(d²) a query and O(nd²) in all, beyond it O(nd) a query.
        universal: a set to reuse instead of choosing one; its leading dimensions are k's.
        return_set: also give back the set; if causal, the set of each chunk, (*batch, chunks, c).
        chunk: queries in a causal chunk.
        dropout_p: probability of dropping a weight.

    Raises:
        ValueError: shapes, heads or options that do not fit together, each named.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16).unbind()
        >>> attend(q, k, v, top_k=8).shape
        torch.Size([2, 4, 100, 16])
    """
    q, k, v = autocast(q, k, v)
    groups = require_shapes(q, k, v, enable_gqa)
    if not torch.compiler.is_compiling():
        # Kernels read numbers as they lie in memory, where a lazily negated view has its sign wrong.
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    m, n = q.shape[-2], k.shape[-2]
    mask = require_mask(key_mask, k)
    residual = Drop() if residual is None else residual
    require_residual(residual, loss, eps, is_causal)
    require_normaliser(normaliser, loss, is_causal, residual)
    choice = require_choice(top_k, eps, scorer, loss, universal)
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk: expected a positive integer, got {chunk!r}")
    band = as_window(window, m, n)
    if scale is None:
        scale = 1.0 if loss is not None else 1 / math.sqrt(q.shape[-1])

    with torch.autocast(q.device.type, enabled=False):
        head = Head(q.reshape(*k.shape[:-2], groups, m, q.shape[-1]), k, v, mask, float(scale), loss, dropout_p)
        used: UniversalSet | None
        if choice is not None and choice.top_k is not None and choice.top_k >= n:
            part, used = head.full(is_causal, masked=key_mask is not None), everything(mask)
        else:
            fixed = None if universal is None else require_universal(universal, mask)
            masked = key_mask is not None
            at_once = None
            if is_causal and not return_set:
                at_once = head.causal_at_once(choice, fixed, band, chunk, masked)
            elif isinstance(residual, Drop) and band is None and not return_set:
                at_once = head.best_at_once(choice, masked)
            if masked and at_once is None:
                head = head.cleaned()
            if at_once is not None:
                part, used = at_once, None
            elif is_causal:
                running = None if choice is None else RunningSet(head.k.detach(), mask, choice)
                part, sets = head.causal(running, fixed, band, chunk)
                used = stack_sets(sets, k) if return_set else None
            else:
                if choice is None:
                    used = fixed
                elif choice.top_k is not None and not residual.best(choice.top_k) and not return_set:
                    used = nothing(mask, choice.top_k)
                else:
                    used = choice(head.k.detach(), mask, certify=return_set)
                assert used is not None  # the choice or the given set
                if isinstance(residual, Drop) and band is None and head.fused():
                    every = choice is not None and choice.top_k is not None and key_mask is None
                    part = head.over_keys(used, every)
                else:
                    slots = residual(*head.rows(), used, mask, head.query_mask(), head.scale)
                    part = head.over(slots, band)
        out = part.out if normaliser is None else head.normalised(part)
        out = out.to(q.dtype).reshape(*q.shape[:-1], v.shape[-1])
    return (out, used) if return_set and used is not None else out
