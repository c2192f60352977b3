"""Softmax attention of every query over a few gathered rows of the keys and values, with gradients.

The gather is part of the load: the selected rows of K and V are read where they lie and stay on chip while a program
walks over its queries, so that Q is read once and O written once. Up to `BLOCK_C` rows need no online softmax.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .attention_backward import backward
from .common import dot, eager, launch, next_power, padded_dim, precision, row_splits, small
from .replay import differentiated, replayed
from .slots import absorb, finished, gather, slots


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, index_ptr, bias_ptr, valid_ptr, out_ptr, lse_ptr,
    m, c, d, heads, group, scale, rows_per_split,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    HAS_BIAS: tl.constexpr, HAS_VALID: tl.constexpr, ONE_BLOCK: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = head // heads
    q_head = head % heads
    kv_head = q_head // group
    q_ptr += batch * sqb + q_head * sqh
    out_ptr += batch * sob + q_head * soh
    k_ptr += batch * skb + kv_head * skh
    v_ptr += batch * svb + kv_head * svh
    first = (batch * (heads // group) + kv_head) * c
    index_ptr += first
    bias_ptr += first
    valid_ptr += first
    dtype = q_ptr.dtype.element_ty

    lo = split * rows_per_split
    hi = tl.minimum(lo + rows_per_split, m)
    row = tl.arange(0, BLOCK_M)
    col = tl.arange(0, D)
    # Tiles are reached by advancing a 64-bit base, so that offsets inside a tile fit in 32 bits.
    q_ptr += lo.to(tl.int64) * sqm
    out_ptr += lo.to(tl.int64) * som
    scale2 = scale * 1.4426950408889634
    if ONE_BLOCK:
        source, bias, usable = slots(index_ptr, bias_ptr, valid_ptr, 0, c, HAS_BIAS, HAS_VALID, BLOCK_C)
        k = gather(k_ptr, source, usable, skn, skd, d, D)
        v = gather(v_ptr, source, usable, svn, svd, d, D)
    for start in range(lo, hi, BLOCK_M):
        here = start + row
        inside = (here < hi)[:, None] & (col < d)[None, :]
        q = tl.load(q_ptr + row[:, None] * sqm + col[None, :] * sqd, mask=inside, other=0.0)
        if ONE_BLOCK:
            s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_C], tl.float32), PRECISION)
            if EXACT:
                top = tl.max(s, axis=1) * scale2
                p = tl.exp2(s * scale2 - top[:, None])
            else:
                s = tl.where(usable[None, :], s * scale2 + bias[None, :], float("-inf"))
                top = tl.max(s, axis=1)
                top = tl.where(top == float("-inf"), 0.0, top)
                p = tl.exp2(s - top[:, None])
            total = tl.sum(p, axis=1)
            acc = dot(p.to(dtype), v, tl.zeros([BLOCK_M, D], tl.float32), PRECISION)
        else:
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, D], tl.float32)
            for c0 in range(0, c, BLOCK_C):
                source, bias, usable = slots(index_ptr, bias_ptr, valid_ptr, c0, c, HAS_BIAS, HAS_VALID, BLOCK_C)
                k = gather(k_ptr, source, usable, skn, skd, d, D)
                v = gather(v_ptr, source, usable, svn, svd, d, D)
                s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_C], tl.float32), PRECISION) * scale2
                s = tl.where(usable[None, :], s + bias[None, :], float("-inf"))
                top, total, acc = absorb(s, v, top, total, acc, PRECISION)
        out, lse = finished(top, total, acc)
        tl.store(out_ptr + row[:, None] * som + col[None, :] * sod, out.to(dtype), mask=inside)
        tl.store(lse_ptr + head * m + here, lse, mask=here < hi)
        q_ptr += BLOCK_M * sqm
        out_ptr += BLOCK_M * som


def _forward_config(c, d, dtype, tight=False):
    """(queries of a tile, slots of a block, warps, stages, programs on a multiprocessor)."""
    padded, wide = padded_dim(d), dtype == torch.float32
    if wide:
        edge = 64 if padded <= (64 if tight else 128) else 32
        return edge, min(edge, max(16, next_power(c))), 4, 2, 2
    if padded > 128:
        return 64, min(64, max(16, next_power(c))), 4, 2, 1
    block_c = min(128, max(16, next_power(c)))
    if block_c * padded <= 64 * 64:
        return 64, block_c, 4, 4, 4
    return 128, block_c, 8, 4, 1


@replayed
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor,
    bias: torch.Tensor | None, valid: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    b, heads, m, d = q.shape
    kv_heads, c = index.shape[1:]
    block_m, block_c, warps, stages, per_sm = _forward_config(c, d, q.dtype, small(q))
    splits, rows = row_splits(m, b * heads, block_m, q, per_sm)
    out = torch.empty_like(q)
    lse = q.new_empty((b, heads, m), dtype=torch.float32)
    index = index.contiguous()
    bias_data = index if bias is None else bias.contiguous()
    valid_data = index if valid is None else valid.contiguous()
    launch(
        _forward_kernel, (splits, b * heads), (q, k, v, index, bias_data, valid_data, out, lse),
        (m, c, d, heads, heads // kv_heads, scale, rows, *q.stride(), *k.stride(), *v.stride(), *out.stride()),
        {"HAS_BIAS": bias is not None, "HAS_VALID": valid is not None, "ONE_BLOCK": c <= block_c,
             "EXACT": bias is None and valid is None and c == block_c, "PRECISION": precision(q.dtype),
             "D": padded_dim(d), "BLOCK_M": block_m, "BLOCK_C": block_c},
        warps=warps, stages=stages,
    )  # fmt: skip
    return out, lse


_attention_op = torch.library.custom_op("levattention::gathered_attention", _attention, mutates_args=())


@_attention_op.register_fake
def _(q, k, v, index, bias, valid, scale):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    q, k, v, index, bias, valid, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, index, bias, valid, *output)
    # In eager mode a gradient that nobody asked for stays None instead of becoming zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, index, bias, valid, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    with_dbias = ctx.needs_input_grad[4]
    grads = backward(grad_out, grad_lse, q, k, v, index, bias, valid, out, lse, ctx.scale, with_dbias)
    return (*grads[:3], None, grads[3] if with_dbias else None, None, None)


_attention_op.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The operator without the dispatcher.

    With one function for result and context: parted in two, PyTorch inspects the signature anew at each call.
    """

    @staticmethod
    def forward(ctx, *inputs):
        output = _attention(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    # The kernels' gradients carry no graph of their own: a second derivative is refused, not silently zero.
    backward = staticmethod(once_differentiable(_backward))  # type: ignore[assignment]


def gathered_attention(q, k, v, index, bias=None, *, scale, valid=None):
    """softmax(scale·q K[index]ᵀ + bias) V[index] and the logarithm of the softmax's sum.

    Args:
        q: (B, Hq, m, d).
        k: (B, Hkv, n, d), Hq a multiple of Hkv; any strides.
        v: (B, Hkv, n, d).
        index: (B, Hkv, c) int64 rows of k and v. Valid slots hold distinct rows.
        bias: (B, Hkv, c) added to the logits; −inf excludes the slot.
        scale: factor of the logits.
        valid: (B, Hkv, c) bool; False excludes the slot, whatever its index.

    Returns:
        (out, lse): (B, Hq, m, d) of q's type and strides, and (B, Hq, m) fp32. A head without a usable slot gives zeros
        and −inf. Gradients reach q, k, v and bias through both; those of k and v are zero on rows not gathered.

    Raises:
        ValueError: the shapes or types do not fit.
    """
    if q.shape[1] % k.shape[1] or k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.shape[0] != k.shape[0]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if index.shape[:2] != k.shape[:2] or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"index {tuple(index.shape)} and k {tuple(k.shape)} must share B and Hkv, and q, k, v one dtype"
        )
    scale = float(scale)
    if scale < 0:
        # The kernels take a row's largest logit before scaling it.
        q, scale = -q, -scale
    if not eager(q):
        return _attention_op(q, k, v, index, bias, valid, scale)
    if differentiated(q, k, v, *(() if bias is None else (bias,))):
        return _Attention.apply(q, k, v, index, bias, valid, scale)
    return _attention(q, k, v, index, bias, valid, scale)
