"""LevAttention with a fixed number of keys: choose a route by shape, select, attend."""

import torch

from .attention import gathered_attention
from .factor import whiten
from .gram_matrix import gram
from .replay import eager, replayed
from .scores import leverage
from .selection import top_k as largest
from .short import short_top_k, takes


def select(keys, k, mask=None):
    """The positions of the k keys of largest leverage, best first, the smaller position first among equals.

    Args:
        keys: (*batch, n, d), bf16, fp16 or fp32, any strides.
        k: 1 ≤ k ≤ n.
        mask: (*batch, n) bool or what broadcasts to it; rows where it is False come after every other row.

    Returns:
        (*batch, k) int64, without gradient.

    Raises:
        ValueError: k is not between 1 and n.
    """
    return _select(keys, k, mask) if eager(keys) else ranked(keys, k, mask)[0]


@replayed
def _select(keys, k, mask):
    return ranked(keys, k, mask)[0]


def ranked(keys, k, mask=None):
    """The same positions, and the score of every key, (*batch, n) fp32, −inf where masked."""
    n = keys.shape[-2]
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and n = {n}, got {k}")
    if takes(keys):
        return short_top_k(keys, k, mask)
    scores = leverage(keys, whiten(gram(keys, mask, dtype=torch.float32)), mask)
    return largest(scores, k), scores


def top_k_attention(q, k, v, top_k, *, scale, key_mask=None):
    """Attention of every query over the `top_k` keys of largest leverage of its head.

    Args:
        q: (B, Hq, m, d).
        k: (B, Hkv, n, d), Hq a multiple of Hkv; any strides.
        v: (B, Hkv, n, d).
        top_k: keys kept in each KV head, at most n.
        scale: factor of the logits.
        key_mask: (B, Hkv, n) bool or what broadcasts to it; rows where it is False are neither scored nor attended to.

    Returns:
        (out, index): (B, Hq, m, d), and (B, Hkv, top_k) int64, best first. Gradients reach q and the selected rows of
        k and v; the choice itself has none.

    Raises:
        ValueError: top_k is not between 1 and n, or the shapes or types do not fit.
    """
    mask = None if key_mask is None else key_mask.expand(k.shape[:-1])
    index = select(k, top_k, mask)
    valid = None if mask is None else mask.gather(-1, index)
    out, _ = gathered_attention(q, k, v, index, scale=scale, valid=valid)
    return out, index
