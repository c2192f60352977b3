"""KᵀK in one read of the keys.

Each program owns a run of rows. A tile's product is summed in fp32 by the matrix units and then added to an fp64
accumulator, so that the error does not grow with n; a second kernel adds the programs' partial sums in a fixed order.
Nothing is added atomically: the same keys give the same bits.

Error, relative to the diagonal (‖G̃ − G‖ ≤ δ max G_ii): δ ≈ 1e-7..1e-6 for the default, 1e-16·√n for `precise`.
A leverage score then carries a relative error of about δ·κ², κ the condition number of K after its columns are scaled
to unit norm: the default resolves rankings to κ ≈ 3e2, `precise` everything that fp64 can.
"""

import torch
import triton
import triton.language as tl

from .common import as_heads, cdiv, dot, eager, launch, multiplies_fp64, padded_dim, precision, row_splits

# Rows that plain torch widens to fp64 at a time.
PLAIN_ROWS = 4096


@triton.jit
def _gram_kernel(
    k_ptr, mask_ptr, part_ptr,
    n, d, heads, rows_per_split,
    skb, skh, skn, skd, smb, smh, smn,
    HAS_MASK: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr, DIRECT: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    left = block // BLOCKS
    right = block % BLOCKS
    # Only the upper triangle of blocks is computed; the reduction mirrors it.
    if right < left:
        return
    k_ptr += head // heads * skb + head % heads * skh
    mask_ptr += head // heads * smb + head % heads * smh
    lo = split * rows_per_split
    hi = tl.minimum(lo + rows_per_split, n)
    # Tiles are reached by advancing a 64-bit base, so that offsets inside a tile fit in 32 bits.
    k_ptr += lo.to(tl.int64) * skn

    row = tl.arange(0, BLOCK_N)
    col_i = left * BLOCK_D + tl.arange(0, BLOCK_D)
    col_j = right * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D, BLOCK_D], tl.float64)
    for start in range(lo, hi, BLOCK_N):
        keep = start + row < hi
        if HAS_MASK:
            keep = keep & (tl.load(mask_ptr + (start + row).to(tl.int64) * smn, mask=keep, other=0) != 0)
        ki = tl.load(
            k_ptr + row[:, None] * skn + col_i[None, :] * skd, mask=keep[:, None] & (col_i < d)[None, :], other=0.0
        )
        if BLOCKS == 1:
            kj = ki
        else:
            kj = tl.load(
                k_ptr + row[:, None] * skn + col_j[None, :] * skd, mask=keep[:, None] & (col_j < d)[None, :], other=0.0
            )
        if PRECISE:
            acc = tl.dot(tl.trans(ki.to(tl.float64)), kj.to(tl.float64), acc, out_dtype=tl.float64)
        else:
            acc += dot(tl.trans(ki), kj, tl.zeros([BLOCK_D, BLOCK_D], tl.float32), PRECISION).to(tl.float64)
        k_ptr += BLOCK_N * skn

    i = tl.arange(0, BLOCK_D)
    if DIRECT:
        # One program has the whole matrix; it stores the upper triangle and its mirror image.
        upper = (i[:, None] <= i[None, :]) & (i < d)[None, :]
        tl.store(part_ptr + head * d * d + i[:, None] * d + i[None, :], acc.to(part_ptr.dtype.element_ty), mask=upper)
        tl.store(part_ptr + head * d * d + i[None, :] * d + i[:, None], acc.to(part_ptr.dtype.element_ty), mask=upper)
        return
    tile = ((head * tl.num_programs(0) + split) * (BLOCKS * BLOCKS) + block) * (BLOCK_D * BLOCK_D)
    tl.store(part_ptr + tile + i[:, None] * BLOCK_D + i[None, :], acc.to(part_ptr.dtype.element_ty))


@triton.jit
def _element(flat, d, BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where a program's partial sums hold an element of the matrix.

    (i, j) and (j, i) read the same one, so the result is symmetric to the last bit.
    """
    i = tl.minimum(flat // d, flat % d)
    j = tl.maximum(flat // d, flat % d)
    block = i // BLOCK_D * BLOCKS + j // BLOCK_D
    return (block * BLOCK_D + i % BLOCK_D) * BLOCK_D + j % BLOCK_D


@triton.jit
def _reduce_kernel(
    part_ptr, out_ptr, d, splits,
    BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < d * d
    element = _element(flat, d, BLOCKS, BLOCK_D)
    size = BLOCKS * BLOCKS * BLOCK_D * BLOCK_D
    acc = tl.zeros([BLOCK], tl.float64)
    for start in range(0, splits, 8):
        # Eight loads in flight, added in order.
        for ahead in tl.static_range(8):
            split = start + ahead
            part = tl.load(
                part_ptr + (head * splits + split) * size + element, mask=inside & (split < splits), other=0.0
            )
            acc += part.to(tl.float64)
    tl.store(out_ptr + head * d * d + flat, acc, mask=inside)


@triton.jit
def _prefix_kernel(
    part_ptr, base_ptr, out_ptr, d, splits,
    BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The base and each running sum of the parts after it."""
    head = tl.program_id(1).to(tl.int64)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < d * d
    size = BLOCKS * BLOCKS * BLOCK_D * BLOCK_D
    part_ptr += head * splits * size + _element(flat, d, BLOCKS, BLOCK_D)
    out_ptr += head * splits * d * d + flat
    acc = tl.load(base_ptr + head * d * d + flat, mask=inside, other=0.0)
    for start in range(0, splits, 8):
        # Eight loads in flight, added in order.
        for ahead in tl.static_range(8):
            more = inside & (start + ahead < splits)
            acc += tl.load(part_ptr, mask=more, other=0.0).to(tl.float64)
            tl.store(out_ptr, acc, mask=more)
            part_ptr += size
            out_ptr += d * d


def _config(d, dtype, precise):
    """(columns of a block, rows of a tile, warps, stages): accumulators in registers, tiles in shared memory."""
    padded = padded_dim(d)
    if precise:
        return min(padded, 64), 32, 4, 2
    if dtype == torch.float32:
        return min(padded, 64), 64, 4, 3
    return (128, 256, 8, 3) if padded == 128 else (min(padded, 128), 128, 8 if padded > 64 else 4, 3)


def _gram_plain(keys, mask):
    """The precise sum by plain torch, a few thousand rows at a time."""
    total = keys.new_zeros((*keys.shape[:-2], keys.shape[-1], keys.shape[-1]), dtype=torch.float64)
    for start in range(0, keys.shape[-2], PLAIN_ROWS):
        rows = keys[..., start : start + PLAIN_ROWS, :].double()
        if mask is not None:
            seen = mask.expand(*keys.shape[:-1])[..., start : start + PLAIN_ROWS, None]
            rows = torch.where(seen, rows, 0.0)
        total += rows.mT @ rows
    return total.triu() + total.triu(1).mT


def _sum_runs(keys, mask, precise, splits, rows, config, into):
    """One launch: the products summed over each run of `rows` rows, in blocks, or the whole matrix if it is `into`."""
    b, h, n, d = keys.shape
    block_d, block_n, warps, stages = config
    blocks = cdiv(d, block_d)
    m = keys if mask is None else mask
    launch(
        _gram_kernel, (splits, b * h, blocks * blocks),
        (keys, m, into), (n, d, h, rows, *keys.stride(), *m.stride()[:3]),
        {"HAS_MASK": mask is not None, "PRECISE": precise, "PRECISION": precision(keys.dtype), "DIRECT": into.ndim == 3,
             "BLOCKS": blocks, "BLOCK_D": block_d, "BLOCK_N": block_n},
        warps=warps, stages=stages,
    )  # fmt: skip


def _gram(keys: torch.Tensor, mask: torch.Tensor | None, precise: bool, dtype: torch.dtype) -> torch.Tensor:
    if precise and not multiplies_fp64(keys):
        return _gram_plain(keys, mask).to(dtype)
    # The fp64 matrix units take fp32 input only through Triton, so 16-bit keys are widened first.
    k = as_heads(keys.float() if precise else keys, 2)
    b, h, n, d = k.shape
    config = block_d, block_n, _, _ = _config(d, keys.dtype, precise)
    blocks = cdiv(d, block_d)
    splits, rows = row_splits(n, b * h * (blocks * (blocks + 1) // 2), block_n, keys)
    direct = splits == 1 and blocks == 1
    out = keys.new_empty((b * h, d, d), dtype=dtype)
    part = (
        out
        if direct
        else keys.new_empty(
            (b * h, splits, blocks * blocks, block_d, block_d), dtype=torch.float64 if precise else torch.float32
        )
    )
    m = None if mask is None else as_heads(mask.expand(*keys.shape[:-1]), 1)
    _sum_runs(k, m, precise, splits, rows, config, part)
    if not direct:
        launch(
            _reduce_kernel, (cdiv(d * d, 1024), b * h), (part, out), (d, splits),
            {"BLOCKS": blocks, "BLOCK_D": block_d, "BLOCK": 1024}, warps=8,
        )  # fmt: skip
    return out.view(*keys.shape[:-2], d, d)


def prefix_grams(keys, runs, base, mask=None):
    """The Grams of the prefixes that end with each of `runs` runs of keys, all of one length.

    Args:
        keys: (B, H, n, d), bf16, fp16 or fp32, any strides, n a multiple of `runs`.
        runs: into how many runs the keys go.
        base: (B, H, d, d) fp64, the Gram of what lies before the keys.
        mask: (B, H, n) bool; rows where it is False are left out (and not read).

    Returns:
        (B, H, runs, d, d) fp64.
    """
    b, h, n, d = keys.shape
    config = block_d, *_ = _config(d, keys.dtype, False)
    blocks = cdiv(d, block_d)
    part = keys.new_empty((b * h, runs, blocks * blocks, block_d, block_d), dtype=torch.float32)
    out = keys.new_empty((b, h, runs, d, d), dtype=torch.float64)
    _sum_runs(keys, mask, False, runs, n // runs, config, part)
    launch(
        _prefix_kernel, (cdiv(d * d, 512), b * h), (part, base.contiguous(), out), (d, runs),
        {"BLOCKS": blocks, "BLOCK_D": block_d, "BLOCK": 512}, warps=4,
    )  # fmt: skip
    return out


_gram_op = torch.library.custom_op("levattention::gram", _gram, mutates_args=())


@_gram_op.register_fake
def _(keys, mask, precise, dtype):
    d = keys.shape[-1]
    return keys.new_empty((*keys.shape[:-2], d, d), dtype=dtype)


def gram(keys, mask=None, *, precise=False, dtype=torch.float64):
    """KᵀK from one read of the keys, summed in fp64; see the module's text for its error.

    Args:
        keys: (*batch, n, d), bf16, fp16 or fp32, any strides.
        mask: (*batch, n) bool or what broadcasts to it; rows where it is False are left out (and not read).
        precise: form every product in fp64 (exact: two fp32 mantissas fit), for the certified path.
        dtype: of the sums that are given back: fp64, or fp32 for a ranking, whose factor is in fp32 anyway.

    Returns:
        (*batch, d, d), exactly symmetric, the same bits on every call. It has no gradient.
    """
    return (_gram if eager(keys) else _gram_op)(keys.detach(), mask, precise, dtype)
