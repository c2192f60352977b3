"""Causal attention in one launch: every query over its local keys and the set of the keys before its chunk.

A program takes a tile of one chunk's queries and walks once over their local keys, a straight run of memory, and once
over the gathered slots (`chunks` says who sees what). Work and memory are linear in n.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .chunks import local_run, odd_tile, set_tile, tile_of, turn_of
from .common import cdiv, dot, eager, launch, next_power, padded_dim, precision
from .prefill_backward import backward
from .replay import differentiated
from .slots import absorb, finished


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, index_ptr, valid_ptr, mask_ptr, out_ptr, lse_ptr,
    m, n, c, d, heads, group, chunk, reach, scale, set_stride, set_step,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod, smb, smh, smn,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    turn, lo, hi = turn_of(m, chunk, BLOCK_M)
    if lo >= hi:
        return
    head = tl.program_id(1).to(tl.int64)
    batch = head // heads
    q_head = head % heads
    kv_head = q_head // group
    q_ptr += batch * sqb + q_head * sqh + lo.to(tl.int64) * sqm
    out_ptr += batch * sob + q_head * soh + lo.to(tl.int64) * som
    k_ptr += batch * skb + kv_head * skh
    v_ptr += batch * svb + kv_head * svh
    mask_ptr += batch * smb + kv_head * smh
    own = (batch * (heads // group) + kv_head) * set_stride + turn.to(tl.int64) * set_step
    index_ptr += own
    valid_ptr += own

    shift = n - m
    before = turn * chunk + shift
    first = lo + shift
    last = tl.minimum(lo + BLOCK_M, hi) - 1 + shift
    row = tl.arange(0, BLOCK_M)
    col = tl.arange(0, D)
    here = first + row
    inside = (lo + row < hi)[:, None] & (col < d)[None, :]
    q = tl.load(q_ptr + row[:, None] * sqm + col[None, :] * sqd, mask=inside, other=0.0)
    scale2 = scale * 1.4426950408889634
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    start, full, edge, odd, ahead = local_run(first, last, before, reach, HAS_MASK, BLOCK_N)
    for at in range(full.to(tl.int64), edge, BLOCK_N):
        k = tile_of(k_ptr, at, (col < d)[None, :], skn, skd, D, BLOCK_N)
        v = tile_of(v_ptr, at, (col < d)[None, :], svn, svd, D, BLOCK_N)
        s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION) * scale2
        top, total, acc = absorb(s, v, top, total, acc, PRECISION)
    for tile in range(0, odd):
        k, v, seen = odd_tile(
            tile, start, edge, ahead, k_ptr, v_ptr, mask_ptr, here, last, before, reach,
            d, skn, skd, svn, svd, smn, HAS_MASK, D, BLOCK_N,
        )  # fmt: skip
        s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION) * scale2
        top, total, acc = absorb(tl.where(seen, s, float("-inf")), v, top, total, acc, PRECISION)
    # Before the first key there is no set.
    for c0 in range(0, tl.where(before > 0, c, 0), BLOCK_C):
        k, v, source, usable = set_tile(
            c0, c, k_ptr, v_ptr, index_ptr, valid_ptr, before, d, skn, skd, svn, svd, D, BLOCK_C
        )
        s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_C], tl.float32), PRECISION) * scale2
        seen = usable[None, :] & (here[:, None] - source[None, :] > reach)
        top, total, acc = absorb(tl.where(seen, s, float("-inf")), v, top, total, acc, PRECISION)

    out, lse = finished(top, total, acc)
    tl.store(out_ptr + row[:, None] * som + col[None, :] * sod, out.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + head * m + lo + row, lse, mask=lo + row < hi)


def _config(c, chunk, d, dtype):
    """(queries of a tile, keys of a tile, slots of a block, warps, stages)."""
    padded, wide = padded_dim(d), dtype == torch.float32
    if wide:
        queries, keys, warps, stages = (
            (64, 32, 4, 2) if padded <= 64 else (64, 16, 4, 2) if padded == 128 else (16, 16, 4, 2)
        )
    elif padded > 128:
        queries, keys, warps, stages = 64, 32, 8, 2
    else:
        queries, keys, warps, stages = (128, 64, 8, 3) if padded == 128 else (128, 128, 8, 2)
    queries = min(queries, max(16, next_power(chunk)))
    return queries, keys, min(keys, max(16, next_power(c))), warps if queries > 32 else 4, stages


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor, valid: torch.Tensor,
    mask: torch.Tensor | None, chunk: int, reach: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    b, heads, m, d = q.shape
    kv_heads, n = k.shape[1:3]
    sets, c = index.shape[2:]
    block_m, block_n, block_c, warps, stages = _config(c, chunk, d, q.dtype)
    out = torch.empty_like(q)
    lse = q.new_empty((b, heads, m), dtype=torch.float32)
    index, valid = index.contiguous(), valid.contiguous()
    seen = k[..., 0] if mask is None else mask.expand(k.shape[:3])
    launch(
        _prefill_kernel, (cdiv(m, chunk) * cdiv(chunk, block_m), b * heads),
        (q, k, v, index, valid, seen, out, lse),
        (m, n, c, d, heads, heads // kv_heads, chunk, reach, scale, sets * c, c if sets > 1 else 0,
         *q.stride(), *k.stride(), *v.stride(), *out.stride(), *seen.stride()),
        {"HAS_MASK": mask is not None, "PRECISION": precision(q.dtype),
             "D": padded_dim(d), "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_C": block_c},
        warps=warps, stages=stages,
    )  # fmt: skip
    return out, lse


_prefill_op = torch.library.custom_op("levattention::causal_attention", _prefill, mutates_args=())


@_prefill_op.register_fake
def _(q, k, v, index, valid, mask, chunk, reach, scale):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    q, k, v, index, valid, mask, ctx.chunk, ctx.reach, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, index, valid, mask, *output)
    # In eager mode a gradient that nobody asked for stays None instead of becoming zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, index, valid, mask, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = backward(grad_out, grad_lse, q, k, v, index, valid, mask, out, lse, ctx.chunk, ctx.reach, ctx.scale)
    return (*grads, None, None, None, None, None, None)


_prefill_op.register_autograd(_backward, setup_context=_setup_context)


class _Prefill(torch.autograd.Function):
    """The operator without the dispatcher."""

    forward = staticmethod(_prefill)
    setup_context = staticmethod(_setup_context)
    # The kernels' gradients carry no graph of their own: a second derivative is refused, not silently zero.
    backward = staticmethod(once_differentiable(_backward))  # type: ignore[assignment]


def causal_attention(q, k, v, index, valid, *, chunk, reach=0, scale, mask=None):
    """Causal softmax attention over local keys and each chunk's set, and the logarithm of the softmax's sum.

    Args:
        q: (B, Hq, m, d), the last m of n positions, m ≤ n.
        k: (B, Hkv, n, d), Hq a multiple of Hkv; any strides.
        v: (B, Hkv, n, d).
        index: (B, Hkv, chunks, c) int64, the set of each chunk of queries, or (B, Hkv, 1, c), one for all. Keys at or
            after the first position of a chunk are passed over there. Valid slots of a chunk hold distinct rows.
        valid: the same shape, bool; False excludes the slot, whatever its index.
        chunk: queries of a chunk, whose own causal block they see.
        reach: how far before it a query sees every key besides.
        scale: factor of the logits.
        mask: (B, Hkv, n) bool or what broadcasts to it: which keys may be seen locally. The set must hold no other.

    Returns:
        (out, lse): (B, Hq, m, d) of q's type and strides, and (B, Hq, m) fp32; zeros and −inf where no key is seen.
        Gradients reach q, k and v through both.

    Raises:
        ValueError: the shapes or types do not fit.
    """
    m, n = q.shape[2], k.shape[2]
    if q.shape[1] % k.shape[1] or k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.shape[0] != k.shape[0]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if m > n:
        raise ValueError(f"q: expected at most the n = {n} keys' positions, got m = {m}")
    if chunk < 1 or reach < 0:
        raise ValueError(f"chunk, reach: expected chunk >= 1 and reach >= 0, got {chunk} and {reach}")
    if index.shape[:2] != k.shape[:2] or index.shape[2] not in (1, -(-m // chunk)) or valid.shape != index.shape:
        raise ValueError(
            f"index, valid: expected {(*k.shape[:2], -(-m // chunk), 'c')}, got {tuple(index.shape)} and "
            f"{tuple(valid.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    # No query is further than n from a key, and no chunk holds more than m; larger ones would only overflow.
    reach, chunk, scale = min(reach, n), min(chunk, max(m, 1)), float(scale)
    if scale < 0:
        q, scale = -q, -scale
    if not eager(q):
        return _prefill_op(q, k, v, index, valid, mask, chunk, reach, scale)
    if differentiated(q, k, v):
        return _Prefill.apply(q, k, v, index, valid, mask, chunk, reach, scale)
    return _prefill(q, k, v, index, valid, mask, chunk, reach, scale)
