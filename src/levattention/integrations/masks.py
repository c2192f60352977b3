"""transformers' masks as what `attend` takes: a padding mask of keys, and whether attention is causal.

A mask that says anything else is refused: LevAttention shares one set of keys among all queries of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **rest: Any,
) -> Tensor | None:
    """The mask in the smallest form: what transformers calls for the implementation's name.

    None where nothing is hidden beyond the module's own causality; (B, 1, n) for causal attention with padding;
    (B, 1, 1, n) for padding alone. Any other pattern comes back in full, (B, 1, m, n), and `read_mask` judges it.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    mask_function = causal_mask_function if mask_function is None else mask_function
    at_end = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    causal = mask_function is causal_mask_function and at_end
    if not causal and mask_function is not bidirectional_mask_function:
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **{name: rest[name] for name in ("use_vmap", "device") if name in rest},
        )
    padding = _padding(attention_mask, batch_size, kv_length, kv_offset)
    if padding is None:
        if allow_is_causal_skip if causal else allow_is_bidirectional_skip:
            return None
        padding = torch.ones(batch_size, kv_length, dtype=torch.bool, device=rest.get("device"))
    return padding[:, None] if causal else padding[:, None, None]


def _padding(attention_mask: Tensor | None, batch_size: int, kv_length: int, kv_offset: int) -> Tensor | None:
    """The (B, n) padding mask of the keys at hand; None where no key is hidden."""
    if attention_mask is None:
        return None
    padding = torch.nn.functional.pad(
        attention_mask.bool(), (0, max(0, kv_length + kv_offset - attention_mask.shape[-1]))
    )
    padding = padding[:, kv_offset : kv_offset + kv_length].expand(batch_size, kv_length)
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    return padding


def read_mask(mask: Tensor | None, m: int, n: int, is_causal: bool) -> tuple[Tensor | None, bool]:
    """(key mask, causal or not) of a mask that a module received.

    Args:
        mask: a form of `compact_mask`; or (B, n), padding alone; or the user's own (B, H or 1, m or 1, n), boolean or
            additive.
        m: number of queries.
        n: number of keys.
        is_causal: what the module says of itself, which decides where the mask does not.

    Raises:
        ValueError: a mask that is neither padding nor causal with padding.
    """
    if mask is None:
        return None, is_causal
    if mask.shape[-1] != n or mask.ndim not in (2, 3, 4) or (mask.ndim == 3 and mask.shape[1] != 1):
        raise ValueError(f"attention_mask: expected a mask of {n} keys, got shape {tuple(mask.shape)}")
    if mask.ndim == 2:
        return mask.bool(), is_causal
    if mask.ndim == 3:
        return mask, True
    seen = _visible(mask)
    if mask.shape[-2] == 1:
        return seen.squeeze(-2), is_causal and m == 1
    last = seen[..., -1, :]
    if torch.equal(seen, last.unsqueeze(-2).expand_as(seen)):
        return last, False
    ends = torch.ones(m, n, dtype=torch.bool, device=mask.device).tril(n - m)
    if torch.equal(seen, last.unsqueeze(-2) & ends):
        return last, True
    raise ValueError(
        f"attention_mask: expected padding, or a causal mask aligned at the last key, got a mask of shape "
        f"{tuple(mask.shape)} that hides other keys from other queries (a sliding window, packed sequences, a prefix "
        "or a static cache); LevAttention shares one set of keys among all queries of a head"
    )


def _visible(mask: Tensor) -> Tensor:
    """A boolean or additive mask as boolean.

    Raises:
        ValueError: an additive mask that holds anything but 0 and the hiding value.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask != 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((hidden | (mask == 0)).all()):
        raise ValueError(
            "attention_mask: expected 0 for visible keys and the lowest number for hidden ones, got an additive bias; "
            "LevAttention scores keys without regard to the query, so a bias for each query has no place in it"
        )
    return ~hidden
