"""What `attend` asks of its arguments: shapes and options only, so that nothing waits for a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from levattention.checks import FLOATS, require_eps, require_same_device
from levattention.losses import Loss, Power
from levattention.residuals import Cluster, Drop, Residual
from levattention.scorers import Scorer
from levattention.select import Choice
from levattention.universal import UniversalSet, default_scorer


def autocast(*tensors: Any) -> list[Any]:
    """The tensors in autocast's dtype where autocast is on, as PyTorch's own attention takes them; fp64 stays."""
    kinds = {x.device.type for x in tensors if isinstance(x, Tensor)}
    kind = next(iter(kinds), "cpu")
    if len(kinds) != 1 or not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x for x in tensors]


def require_shapes(q: Any, k: Any, v: Any, enable_gqa: bool) -> int:
    """How many query heads share a key head, once q, k and v fit together.

    Raises:
        ValueError: says which of them does not fit.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            came = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: expected an fp16, bf16, fp32 or fp64 tensor, got {came}")
        if x.ndim < 2 or 0 in x.shape[-2:]:
            raise ValueError(f"{name}: expected a non-empty (*batch, rows, columns), got shape {tuple(x.shape)}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        kinds = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"expected q, k and v of one dtype on one device, got {kinds}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"expected as many values as keys in every head, got {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"expected queries and keys of one width d, got {shapes}")
    if q.ndim != k.ndim or q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"expected the same leading dimensions, got {shapes}")
    if q.ndim == 2 or q.shape[-3] == k.shape[-3]:
        return 1
    if not enable_gqa:
        raise ValueError(f"expected as many query heads as key heads (or enable_gqa=True), got {shapes}")
    if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
        raise ValueError(
            f"enable_gqa: expected a multiple of the {k.shape[-3]} key heads, got {q.shape[-3]} query heads"
        )
    return q.shape[-3] // k.shape[-3]


def require_mask(key_mask: Any, k: Tensor) -> Tensor:
    """The mask as (*batch, n); all True for None.

    Raises:
        ValueError: not boolean, or a shape that fits no documented form. A mask for each query is not one of them.
    """
    n = k.shape[-2]
    if key_mask is None:
        return torch.ones((), dtype=torch.bool, device=k.device).expand(k.shape[:-1])
    forms = "(B, n), (B, 1, n) or (B, H_kv, n)" if k.ndim == 4 else "(*batch, n)"
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        came = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise ValueError(f"key_mask: expected a boolean tensor {forms}, True for keys that may be seen, got {came}")
    shape = tuple(key_mask.shape)
    if k.ndim == 4 and shape == (k.shape[0], n):
        key_mask = key_mask.unsqueeze(1)
    fits = key_mask.ndim == k.ndim - 1 and key_mask.shape[-1] == n
    if not fits or any(a not in (1, b) for a, b in zip(key_mask.shape, k.shape[:-1], strict=True)):
        raise ValueError(f"key_mask: expected {forms} for keys {tuple(k.shape)}, got {shape}")
    require_same_device([("key_mask", key_mask), ("k", k)])
    return key_mask.expand(k.shape[:-1])


def require_choice(
    top_k: Any, eps: Any, scorer: Scorer | None, loss: Loss | None, universal: UniversalSet | None
) -> Choice | None:
    """How keys are to be chosen; None where a set is given.

    Raises:
        ValueError: not exactly one of top_k, eps and universal; a top_k that is no positive integer; eps outside
            (0, 1] or with a scorer that certifies nothing.
    """
    given = {"top_k": top_k, "eps": eps, "universal": None if universal is None else "a set"}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        came = " and ".join(f"{name}={value}" for name, value in given.items()) or "none"
        raise ValueError(f"expected exactly one of top_k, eps and universal, got {came}")
    if universal is not None:
        if scorer is not None:
            raise ValueError("scorer: a given universal set is not scored again; leave the scorer out")
        return None
    scorer = default_scorer(Power(2) if loss is None else loss) if scorer is None else scorer
    if eps is not None:
        eps = require_eps(eps)
        if not scorer.certified:
            raise ValueError(f"eps: {type(scorer).__name__} scores certify no threshold; give top_k instead")
    elif isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ValueError(f"top_k: expected a positive integer, got {top_k!r}")
    return Choice(scorer, top_k, eps)


def require_residual(residual: Residual, loss: Loss | None, eps: Any, is_causal: bool) -> None:
    """Nothing, if the residual goes with the other options."""
    if isinstance(residual, Drop):
        return
    name = type(residual).__name__
    if eps is not None:
        raise ValueError(f"residual: {name} spends a budget of slots; give top_k instead of eps")
    if is_causal:
        raise ValueError(f"residual: {name} stands for the light keys of a whole head; causal attention takes Drop")
    if isinstance(residual, Cluster) and loss is not None:
        raise ValueError(f"residual: Cluster sums exponentials, got loss={loss}; use Drop or Sample")


def require_normaliser(normaliser: Any, loss: Loss | None, is_causal: bool, residual: Residual) -> None:
    """Nothing, if the normaliser is one that exists and goes with the other options."""
    if normaliser is None:
        return
    if normaliser != "exact":
        raise ValueError(f"normaliser: expected None or 'exact', got {normaliser!r}")
    if not (isinstance(loss, Power) and loss.even):
        raise ValueError(f"normaliser: the exact sum over all keys is for even powers, got loss={loss}")
    if is_causal:
        raise ValueError(
            "normaliser: the exact sum over all keys does not stop at a query's position; not for is_causal"
        )
    if not isinstance(residual, Drop):
        raise ValueError(f"normaliser: {type(residual).__name__} already stands for all keys; use Drop")


def require_universal(universal: UniversalSet, mask: Tensor) -> UniversalSet:
    """The set for these keys: expanded to their leading dimensions, without the keys that may not be seen.

    Raises:
        ValueError: leading dimensions that do not fit.
    """
    batch = mask.shape[:-1]
    shape = tuple(universal.index.shape)
    if len(shape) != len(batch) + 1 or any(a not in (1, b) for a, b in zip(shape, batch, strict=False)):
        raise ValueError(f"universal: expected leading dimensions {tuple(batch)}, got an index of shape {shape}")
    require_same_device([("universal", universal.index), ("k", mask)])
    index, valid, scores = (x.expand(*batch, shape[-1]) for x in (universal.index, universal.valid, universal.scores))
    valid = valid & mask.gather(-1, index)
    return replace(universal, index=index * valid, valid=valid, scores=scores * valid, eps=universal.eps.expand(batch))
