"""Scores and top-k of a short sequence (vision transformers) in one launch, a program a head.

With the Gram matrix and its factor this makes three launches before attention. One launch for all of it was measured
and lost: the factor wants one warp a head and the rest wants four, and either choice cost more than two launches.
"""

import torch
import triton
import triton.language as tl

from .common import as_heads, eager, launch, next_power, padded_dim, precision, small
from .factor import whiten
from .gram_matrix import gram
from .scores import at_most_one, split_whitening, squares
from .selection import best_first, sortable, winners

MAX_KEYS = 1024
MAX_DIM = 128


@triton.jit
def _short_kernel(
    k_ptr, p_ptr, mask_ptr, score_ptr, key_ptr, position_ptr, index_ptr,
    n, d, heads, top_k,
    skb, skh, skn, skd, smb, smh, smn,
    HAS_MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    k_ptr += head // heads * skb + head % heads * skh
    mask_ptr += head // heads * smb + head % heads * smh
    score_ptr += head * n
    row = tl.arange(0, BLOCK_N)
    col = tl.arange(0, D)
    inside = (col < d)[:, None] & (col < d)[None, :]
    p = tl.load(p_ptr + head * d * d + col[:, None] * d + col[None, :], mask=inside, other=0.0)
    high, low, unscale = split_whitening(p, k_ptr.dtype.element_ty) if SPLIT else (p, p, p)
    for start in range(0, n, BLOCK_N):
        keep = start + row < n
        k = tl.load(
            k_ptr + (start + row)[:, None] * skn + col[None, :] * skd,
            mask=keep[:, None] & (col < d)[None, :],
            other=0.0,
        )
        score = at_most_one(squares(k, p, high, low, unscale, SPLIT, PRECISION))
        if HAS_MASK:
            real = tl.load(mask_ptr + (start + row) * smn, mask=keep, other=0) != 0
            score = tl.where(real, score, float("-inf"))
        tl.store(score_ptr + start + row, score, mask=keep)
    # Each stage hands over through memory that this program alone touches; the barriers order its threads.
    tl.debug_barrier()
    at = tl.arange(0, N)
    key = sortable(tl.load(score_ptr + at, mask=at < n, other=0.0), at < n)
    chosen, slot = winners(key, top_k)
    tl.store(key_ptr + head * top_k + slot, key, mask=chosen)
    tl.store(position_ptr + head * top_k + slot, at, mask=chosen)
    tl.debug_barrier()
    best_first(key_ptr + head * top_k, position_ptr + head * top_k, index_ptr + head * top_k, top_k, K, 16)


def _config(d, dtype):
    """(rows of a tile, warps, stages)."""
    wide = dtype == torch.float32
    return (64, 4, 2) if wide or d > 64 else (128, 4, 2)


def _short(
    keys: torch.Tensor, whitening: torch.Tensor, k: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    x = as_heads(keys, 2)
    b, h, n, d = x.shape
    scores = keys.new_empty(keys.shape[:-1], dtype=torch.float32)
    # Two tensors, so that both start where any load may, whatever b * h * k is.
    best, places = (keys.new_empty((b * h, k), dtype=torch.int32) for _ in range(2))
    index = keys.new_empty((*keys.shape[:-2], k), dtype=torch.int64)
    m = x if mask is None else as_heads(mask.expand(*keys.shape[:-1]), 1)
    block_n, warps, stages = _config(d, keys.dtype)
    launch(
        _short_kernel, (b * h,), (x, whitening.contiguous(), m, scores, best, places, index),
        (n, d, h, k, *x.stride(), *m.stride()[:3]),
        {"HAS_MASK": mask is not None, "SPLIT": keys.dtype != torch.float32, "PRECISION": precision(keys.dtype),
             "D": padded_dim(d), "BLOCK_N": block_n, "N": max(16, next_power(n)), "K": max(16, next_power(k))},
        warps=warps, stages=stages,
    )  # fmt: skip
    return index, scores


_short_op = torch.library.custom_op("levattention::short_top_k", _short, mutates_args=())


@_short_op.register_fake
def _(keys, whitening, k, mask):
    index = keys.new_empty((*keys.shape[:-2], k), dtype=torch.int64)
    return index, keys.new_empty(keys.shape[:-1], dtype=torch.float32)


def takes(keys):
    """Whether the keys are few and narrow enough; a wide fp32 whitening alone fills a small GPU's shared memory.

    Keys of a head that lie gigabytes apart are left to the kernels that count in 64 bits.
    """
    n, d = keys.shape[-2:]
    narrow = 64 if keys.dtype == torch.float32 and small(keys) else MAX_DIM
    return n <= MAX_KEYS and d <= narrow and n * abs(keys.stride(-2)) + d * abs(keys.stride(-1)) < 1 << 31


def short_top_k(keys, k, mask=None):
    """The k keys of largest leverage and every key's score, in three launches, for n ≤ 1024 and d ≤ 128.

    Args:
        keys: (*batch, n, d), bf16, fp16 or fp32, any strides.
        k: 1 ≤ k ≤ n.
        mask: (*batch, n) bool or what broadcasts to it; rows where it is False are left out.

    Returns:
        (index, scores): (*batch, k) int64, best first, and (*batch, n) fp32, −inf on masked rows.

    Raises:
        ValueError: n, d or k is out of range.
    """
    n, d = keys.shape[-2:]
    if not takes(keys):
        raise ValueError(
            f"the short route takes {MAX_KEYS} x {MAX_DIM} keys, fewer in fp32 on a small GPU, got {n} x {d}"
        )
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and n = {n}, got {k}")
    keys = keys.detach()
    return (_short if eager(keys) else _short_op)(keys, whiten(gram(keys, mask, dtype=torch.float32)), k, mask)
