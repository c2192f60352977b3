"""τ_i = ‖k_i P‖² fused with the read of the keys: no n×d intermediate is written.

bf16 and fp16 keys enter the matrix units as they are; P, which is fp32, enters as the sum of two matrices of the
keys' type, so that the product carries 16 (bf16) or 22 (fp16) bits of it. fp32 keys use three tf32 products.
"""

import torch
import triton
import triton.language as tl

from .common import as_heads, dot, eager, launch, padded_dim, precision, row_splits, small


@triton.jit
def split_whitening(p, LIKE: tl.constexpr):
    """(high, low, unscale): p ≈ (high + low)·unscale, high and low of type LIKE.

    fp16 has few exponents, so its columns are first brought near 2⁸ by a power of two; bf16 needs no scaling.
    """
    if tl.float16 == LIKE:
        top = tl.max(tl.abs(p), axis=0)
        exponent = tl.where(top > 0, tl.floor(tl.log2(tl.where(top > 0, top, 1.0))) - 8.0, 0.0)
        p = p * tl.exp2(-exponent)[None, :]
        unscale = tl.exp2(exponent)
    else:
        unscale = tl.max(p, axis=0) * 0.0 + 1.0
    high = p.to(LIKE)
    low = (p - high.to(tl.float32)).to(LIKE)
    return high, low, unscale


@triton.jit
def squares(k, p, high, low, unscale, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """‖kP‖² of a tile's rows over a block of P's columns; with SPLIT P comes as (high + low)·unscale."""
    zero = tl.zeros([k.shape[0], p.shape[1]], tl.float32)
    if SPLIT:
        y = dot(k, low, dot(k, high, zero, PRECISION), PRECISION)
        if k.dtype == tl.float16:
            y = y * unscale[None, :]
    else:
        y = dot(k, p, zero, PRECISION)
    return tl.sum(y * y, axis=1)


@triton.jit
def at_most_one(score):
    """Rounding may leave a little more. NaN, of a row that holds one, becomes 1, so that the row is chosen and seen."""
    return tl.where(score < 1.0, score, 1.0)


@triton.jit
def _leverage_kernel(
    k_ptr, p_ptr, mask_ptr, out_ptr,
    n, d, heads, rows_per_split,
    skb, skh, skn, skd, smb, smh, smn,
    EACH: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    k_ptr += head // heads * skb + head % heads * skh
    mask_ptr += head // heads * smb + head % heads * smh
    lo = split * rows_per_split
    hi = tl.minimum(lo + rows_per_split, n)
    row = tl.arange(0, BLOCK_N)
    col = tl.arange(0, D)
    k_ptr += lo.to(tl.int64) * skn
    out_ptr += head * n
    p_ptr += (head * tl.num_programs(0) + split if EACH else head) * d * d
    # One block of P's columns at a time: all of it for d ≤ 128, which is then read once and stays put.
    for j0 in tl.static_range(0, D, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        p = tl.load(p_ptr + col[:, None] * d + j[None, :], mask=(col < d)[:, None] & (j < d)[None, :], other=0.0)
        high, low, unscale = split_whitening(p, k_ptr.dtype.element_ty) if SPLIT else (p, p, p)
        tile_ptr = k_ptr
        for start in range(lo, hi, BLOCK_N):
            at = start + row
            keep = at < hi
            k = tl.load(
                tile_ptr + row[:, None] * skn + col[None, :] * skd, mask=keep[:, None] & (col < d)[None, :], other=0.0
            )
            score = squares(k, p, high, low, unscale, SPLIT, PRECISION)
            if j0 > 0:
                score += tl.load(out_ptr + at, mask=keep, other=0.0)
            if j0 + BLOCK_J >= D:
                score = at_most_one(score)
                if HAS_MASK:
                    real = tl.load(mask_ptr + at.to(tl.int64) * smn, mask=keep, other=0) != 0
                    score = tl.where(real, score, float("-inf"))
            tl.store(out_ptr + at, score, mask=keep)
            tile_ptr += BLOCK_N * skn
        if D > BLOCK_J:
            # The next block adds to what this program has just stored.
            tl.debug_barrier()


@triton.jit
def _halves_kernel(
    k_ptr, p_ptr, mask_ptr, out_ptr,
    n, d, heads, rows_per_split,
    skb, skh, skn, skd, smb, smh, smn,
    EACH: tl.constexpr, HAS_MASK: tl.constexpr, H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same for 16-bit keys with H < d ≤ 2H, without the quarter of P that is zero: P is upper triangular."""
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    lo = split * rows_per_split
    hi = tl.minimum(lo + rows_per_split, n)
    k_ptr += head // heads * skb + head % heads * skh + lo.to(tl.int64) * skn
    mask_ptr += head // heads * smb + head % heads * smh
    p_ptr += (head * tl.num_programs(0) + split if EACH else head) * d * d
    out_ptr += head * n
    row = tl.arange(0, BLOCK_N)
    i = tl.arange(0, H)
    j = H + i
    dtype = k_ptr.dtype.element_ty
    corner = tl.load(p_ptr + i[:, None] * d + i[None, :])
    above = tl.load(p_ptr + i[:, None] * d + j[None, :], mask=(j < d)[None, :], other=0.0)
    below = tl.load(p_ptr + j[:, None] * d + j[None, :], mask=(j < d)[:, None] & (j < d)[None, :], other=0.0)
    c_high, c_low, c_unscale = split_whitening(corner, dtype)
    a_high, a_low, a_unscale = split_whitening(above, dtype)
    b_high, b_low, b_unscale = split_whitening(below, dtype)
    for start in range(lo, hi, BLOCK_N):
        at = start + row
        keep = at < hi
        left = tl.load(k_ptr + row[:, None] * skn + i[None, :] * skd, mask=keep[:, None], other=0.0)
        right = tl.load(k_ptr + row[:, None] * skn + j[None, :] * skd, mask=keep[:, None] & (j < d)[None, :], other=0.0)
        x = dot(left, c_high, tl.zeros([BLOCK_N, H], tl.float32), "tf32")
        x = dot(left, c_low, x, "tf32")
        y = dot(left, a_high, tl.zeros([BLOCK_N, H], tl.float32), "tf32")
        y = dot(left, a_low, y, "tf32")
        if dtype == tl.float16:
            # The two products carry different scales, so they cannot share an accumulator.
            z = dot(right, b_high, tl.zeros([BLOCK_N, H], tl.float32), "tf32")
            z = dot(right, b_low, z, "tf32")
            x = x * c_unscale[None, :]
            y = y * a_unscale[None, :] + z * b_unscale[None, :]
        else:
            y = dot(right, b_high, y, "tf32")
            y = dot(right, b_low, y, "tf32")
        score = at_most_one(tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1))
        if HAS_MASK:
            real = tl.load(mask_ptr + at.to(tl.int64) * smn, mask=keep, other=0) != 0
            score = tl.where(real, score, float("-inf"))
        tl.store(out_ptr + at, score, mask=keep)
        k_ptr += BLOCK_N * skn


def _config(d, dtype, tight=False):
    """(columns of P in a block, rows of a tile, warps, stages, programs on a multiprocessor)."""
    padded = padded_dim(d)
    if dtype == torch.float32:
        return min(padded, 64 if padded <= 128 else 32), 32 if tight and padded > 128 else 64, 4, 2, 1
    if padded > 128:
        return 64, 64, 4, 3, 1
    return (64, 64, 4, 3, 2) if padded == 128 else (padded, 128, 4, 3, 2)


def _leverage(keys: torch.Tensor, whitening: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    k = as_heads(keys, 2)
    b, h, n, d = k.shape
    padded = padded_dim(d)
    block_j, block_n, warps, stages, per_sm = _config(d, keys.dtype, small(keys))
    each = whitening.ndim > keys.ndim
    if each:
        splits = whitening.shape[-3]
        rows = n // splits
    else:
        splits, rows = row_splits(n, b * h, block_n, keys, per_sm)
    out = keys.new_empty((b * h, n), dtype=torch.float32)
    m = k if mask is None else as_heads(mask.expand(*keys.shape[:-1]), 1)
    tensors = (k, whitening.contiguous(), m, out)
    scalars = (n, d, h, rows, *k.stride(), *m.stride()[:3])
    grid, masked = (splits, b * h), mask is not None
    if block_j * 2 == padded == 128 and keys.dtype != torch.float32:
        constants = {"EACH": each, "HAS_MASK": masked, "H": block_j, "BLOCK_N": block_n}
        launch(_halves_kernel, grid, tensors, scalars, constants, warps=warps, stages=stages)
    else:
        constants = {
            "EACH": each, "HAS_MASK": masked, "PRECISION": precision(keys.dtype), "SPLIT": keys.dtype != torch.float32,
            "D": padded, "BLOCK_J": block_j, "BLOCK_N": block_n,
        }  # fmt: skip
        launch(_leverage_kernel, grid, tensors, scalars, constants, warps=warps, stages=stages)
    return out.view(keys.shape[:-1])


_leverage_op = torch.library.custom_op("levattention::leverage", _leverage, mutates_args=())


@_leverage_op.register_fake
def _(keys, whitening, mask):
    return keys.new_empty(keys.shape[:-1], dtype=torch.float32)


def leverage(keys, whitening, mask=None):
    """Leverage scores τ_i = ‖k_i P‖², clamped to at most 1; a key that holds NaN or inf scores 1.

    Args:
        keys: (*batch, n, d), bf16, fp16 or fp32, any strides.
        whitening: (*batch, d, d) fp32, P as `whiten` returns it; for 64 < d ≤ 128 its lower triangle is taken as zero.
            Or (*batch, c, d, d), one for each of c runs of n/c rows.
        mask: (*batch, n) bool or what broadcasts to it; rows where it is False score −inf.

    Returns:
        (*batch, n) fp32, without gradient.
    """
    return (_leverage if eager(keys) else _leverage_op)(keys.detach(), whitening, mask)
