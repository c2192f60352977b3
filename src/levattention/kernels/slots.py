"""The gather that attention's forward and backward kernels share."""

import triton
import triton.language as tl


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
