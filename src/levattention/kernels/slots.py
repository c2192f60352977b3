"""The gather and the online softmax that the attention kernels share."""

import triton
import triton.language as tl

from .common import dot


@triton.jit
def slots(
    index_ptr, bias_ptr, valid_ptr, start, c, HAS_BIAS: tl.constexpr, HAS_VALID: tl.constexpr, BLOCK_C: tl.constexpr
):
    """(row, bias in log2 units, usable) of BLOCK_C slots. A slot is usable if valid and its bias is not −inf."""
    slot = start + tl.arange(0, BLOCK_C)
    usable = slot < c
    row = tl.load(index_ptr + slot, mask=usable, other=0)
    if HAS_VALID:
        usable = usable & (tl.load(valid_ptr + slot, mask=usable, other=0) != 0)
    bias = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + slot, mask=usable, other=0.0).to(tl.float32) * 1.4426950408889634
        usable = usable & (bias > float("-inf"))
        bias = tl.where(usable, bias, 0.0)
    return row, bias, usable


@triton.jit
def gather(ptr, row, usable, stride_n, stride_d, d, D: tl.constexpr):
    """Rows `row` of a matrix, zero where not usable: an excluded row may hold anything, NaN included."""
    col = tl.arange(0, D)
    return tl.load(
        ptr + row[:, None] * stride_n + col[None, :] * stride_d, mask=usable[:, None] & (col < d)[None, :], other=0.0
    )


@triton.jit
def absorb(s, v, top, total, acc, PRECISION: tl.constexpr):
    """(top, total, acc) of an online softmax once the logits s, in log2 units, and their values are in."""
    higher = tl.maximum(top, tl.max(s, axis=1))
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s - reference[:, None])
    shrink = tl.exp2(top - reference)
    total = total * shrink + tl.sum(p, axis=1)
    acc = dot(p.to(v.dtype), v, acc * shrink[:, None], PRECISION)
    return higher, total, acc


@triton.jit
def finished(top, total, acc):
    """(out, lse) at the end of it. With no usable key the sum is 0: the output is 0 and its logarithm −inf."""
    top = tl.where(top == float("-inf"), 0.0, top)
    some = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, (top + tl.log2(some)) * 0.6931471805599453, float("-inf"))
    return acc * (1.0 / some)[:, None], lse
