"""What every named entry point asks of its input: one sentence of what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_keys(keys: Any, name: str = "keys") -> Tensor:
    """The keys themselves, once they are known to be a non-empty floating tensor (*batch, n, d).

    Dense, or `torch.sparse_csr` with two dimensions.

    Raises:
        ValueError: not a tensor, another layout, not floating, fewer than two dimensions, or empty.
    """
    if not isinstance(keys, Tensor):
        raise ValueError(f"{name}: expected a torch tensor of shape (*batch, n, d), got {type(keys).__name__}")
    if keys.dtype not in FLOATS:
        raise ValueError(f"{name}: expected fp16, bf16, fp32 or fp64, got {keys.dtype}")
    if keys.ndim < 2:
        raise ValueError(f"{name}: expected at least two dimensions (*batch, n, d), got shape {tuple(keys.shape)}")
    if keys.layout is not torch.strided and (keys.layout is not torch.sparse_csr or keys.ndim > 2):
        raise ValueError(
            f"{name}: expected a dense tensor or a two-dimensional torch.sparse_csr one, "
            f"got {keys.layout} with shape {tuple(keys.shape)}"
        )
    if 0 in keys.shape:
        raise ValueError(f"{name}: expected at least one row and one column, got shape {tuple(keys.shape)}")
    return keys


def require_finite(keys: Tensor, name: str = "keys") -> None:
    """Nothing, if every entry is finite.

    Raises:
        ValueError: names the first bad row.
    """
    if keys.layout is torch.sparse_csr:
        values = keys.values()
        bad_at = (~values.isfinite()).nonzero()
        if len(bad_at):
            row = int(torch.searchsorted(keys.crow_indices(), bad_at[0, 0], right=True)) - 1
            raise ValueError(f"{name}: row {row} holds {values[bad_at[0, 0]].item()}; every entry must be finite")
        return
    bad = ~keys.isfinite().all(-1)
    if bad.any():
        where = bad.nonzero()[0].tolist()
        values = keys[tuple(where)]
        value = values[~values.isfinite()][0].item()
        place = f"row {where[-1]}" + (f" of batch element {tuple(where[:-1])}" if len(where) > 1 else "")
        raise ValueError(f"{name}: {place} holds {value}; every entry must be finite")


def require_finite_block(block: Tensor, position: int) -> None:
    """Nothing, if every entry of a block of rows that starts at this position is finite; little slower than a sum."""
    # No bad entry leaves a sum finite; a sum that overflowed is looked at entry by entry.
    if not block.sum(dtype=torch.promote_types(block.dtype, torch.float32)).isfinite():
        require_finite(block, f"block at position {position}")


def require_eps(eps: Any) -> float:
    """eps as a float in (0, 1]."""
    try:
        value = float(eps)
    except (TypeError, ValueError):
        raise ValueError(f"eps: expected a number in (0, 1], got {eps!r}") from None
    if not 0.0 < value <= 1.0:
        raise ValueError(f"eps: expected a number in (0, 1], got {eps}")
    return value


def require_count(k: Any, n: int) -> int:
    """k as an int with 1 <= k <= n."""
    if isinstance(k, bool) or not isinstance(k, int):
        raise ValueError(f"k: expected an integer between 1 and n = {n}, got {k!r}")
    if not 1 <= k <= n:
        raise ValueError(f"k: expected an integer between 1 and n = {n}, got {k}")
    return k


def require_one_of_eps_and_k(eps: Any, k: Any) -> None:
    """Nothing, if exactly one of the two is given."""
    if (eps is None) == (k is None):
        came = "neither" if eps is None else f"eps={eps} and k={k}"
        raise ValueError(f"expected exactly one of eps and k, got {came}")


def require_same_device(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Nothing, if all tensors live on one device."""
    named = list(tensors)
    if len({tensor.device for _, tensor in named}) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in named)
        raise ValueError(f"expected all tensors on one device, got {places}")
