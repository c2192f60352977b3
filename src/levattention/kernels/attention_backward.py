"""Gradients of gathered attention: dq where it lies; dk and dv summed over the queries, then written once.

A program owns a run of queries of one head and keeps the gathered keys and values on chip. Small sets get dq, dk and dv
in one pass. Larger ones would not leave registers for all three, so one kernel writes dq and δ = Σ do·o − dlse, and a
second, a block of slots to a program, sums dk and dv. The runs' partial dk and dv go to scratch memory, and a last
kernel adds them in a fixed order into the selected rows of dK and dV, which are zero elsewhere. No atomics: the same
inputs give the same bits.
"""

import torch
import triton
import triton.language as tl

from .common import cdiv, dot, eager, launch, next_power, padded_dim, precision, row_splits, small
from .replay import replayed
from .slots import gather, slots

# The largest slots × columns for which one pass has the registers for dq, dk and dv.
ONE_PASS = 128 * 128


@triton.jit
def _key_kernel(
    do_ptr, dlse_ptr, q_ptr, k_ptr, v_ptr, index_ptr, bias_ptr, valid_ptr, out_ptr, lse_ptr, delta_ptr,
    dq_ptr, dk_ptr, dv_ptr, dbias_ptr, dk_all_ptr, dv_all_ptr,
    m, c, d, heads, group, scale, rows_per_split,
    sgb, sgh, sgm, sgd, sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    sdb, sdh, sdm, sdd, szb, szh, szn, szd, sub, suh, sun, sud,
    HAS_BIAS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_DLSE: tl.constexpr, EXACT: tl.constexpr,
    WITH_DQ: tl.constexpr, FILL: tl.constexpr,
    WITH_DBIAS: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of slots over a run of queries; with WITH_DQ also dq, and then δ is computed here.

    FILL: there are as many keys as queries, and the program clears dK and dV on the rows of its own run, while the
    matrix units are busy; the selected rows are written by the next kernel.
    """
    split = tl.program_id(0)
    block = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    batch = head // heads
    q_head = head % heads
    kv_head = q_head // group
    first = (batch * (heads // group) + kv_head) * c
    dtype = q_ptr.dtype.element_ty
    lo = split * rows_per_split
    hi = tl.minimum(lo + rows_per_split, m)
    q_ptr += batch * sqb + q_head * sqh + lo.to(tl.int64) * sqm
    do_ptr += batch * sgb + q_head * sgh + lo.to(tl.int64) * sgm
    out_ptr += batch * sob + q_head * soh + lo.to(tl.int64) * som
    dq_ptr += batch * sdb + q_head * sdh + lo.to(tl.int64) * sdm
    dk_all_ptr += batch * szb + kv_head * szh + lo.to(tl.int64) * szn
    dv_all_ptr += batch * sub + kv_head * suh + lo.to(tl.int64) * sun

    source, bias, usable = slots(
        index_ptr + first, bias_ptr + first, valid_ptr + first, block * BLOCK_C, c, HAS_BIAS, HAS_VALID, BLOCK_C
    )
    k = gather(k_ptr + batch * skb + kv_head * skh, source, usable, skn, skd, d, D)
    v = gather(v_ptr + batch * svb + kv_head * svh, source, usable, svn, svd, d, D)
    dk = tl.zeros([BLOCK_C, D], tl.float32)
    dv = tl.zeros([BLOCK_C, D], tl.float32)
    dbias = tl.zeros([BLOCK_C], tl.float32)
    row = tl.arange(0, BLOCK_M)
    col = tl.arange(0, D)
    for start in range(lo, hi, BLOCK_M):
        here = start + row
        inside = (here < hi)[:, None] & (col < d)[None, :]
        q = tl.load(q_ptr + row[:, None] * sqm + col[None, :] * sqd, mask=inside, other=0.0)
        do = tl.load(do_ptr + row[:, None] * sgm + col[None, :] * sgd, mask=inside, other=0.0)
        lse2 = tl.load(lse_ptr + head * m + here, mask=here < hi, other=float("inf")) * 1.4426950408889634
        if WITH_DQ:
            out = tl.load(out_ptr + row[:, None] * som + col[None, :] * sod, mask=inside, other=0.0)
            delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), axis=1)
            if HAS_DLSE:
                delta -= tl.load(dlse_ptr + head * m + here, mask=here < hi, other=0.0)
        else:
            delta = tl.load(delta_ptr + head * m + here, mask=here < hi, other=0.0)
        # Slots by queries: the products that sum over queries then take these tiles as they are.
        s = dot(k, tl.trans(q), tl.zeros([BLOCK_C, BLOCK_M], tl.float32), PRECISION) * (scale * 1.4426950408889634)
        if EXACT:
            p = tl.exp2(s - lse2[None, :])
        else:
            # A head without a usable slot has lse −inf; the mask, not the exponential, gives its zeros.
            p = tl.where(usable[:, None], tl.exp2(s + bias[:, None] - lse2[None, :]), 0.0)
        dv = dot(p.to(dtype), do, dv, PRECISION)
        ds = p * (dot(v, tl.trans(do), tl.zeros([BLOCK_C, BLOCK_M], tl.float32), PRECISION) - delta[None, :])
        dk = dot(ds.to(dtype), q, dk, PRECISION)
        if WITH_DBIAS:
            dbias += tl.sum(ds, axis=1)
        if WITH_DQ:
            dq = dot(tl.trans(ds.to(dtype)), k, tl.zeros([BLOCK_M, D], tl.float32), PRECISION) * scale
            tl.store(dq_ptr + row[:, None] * sdm + col[None, :] * sdd, dq.to(dtype), mask=inside)
        if FILL:
            empty = tl.zeros([BLOCK_M, D], dtype)
            tl.store(dk_all_ptr + row[:, None] * szn + col[None, :] * szd, empty, mask=inside)
            tl.store(dv_all_ptr + row[:, None] * sun + col[None, :] * sud, empty, mask=inside)
            dk_all_ptr += BLOCK_M * szn
            dv_all_ptr += BLOCK_M * sun
        q_ptr += BLOCK_M * sqm
        do_ptr += BLOCK_M * sgm
        out_ptr += BLOCK_M * som
        dq_ptr += BLOCK_M * sdm

    slot = block * BLOCK_C + tl.arange(0, BLOCK_C)
    part = (head * tl.num_programs(0) + split) * c
    into = part * d + slot[:, None] * d + col[None, :]
    inside = (slot < c)[:, None] & (col < d)[None, :]
    tl.store(dk_ptr + into, dk * scale, mask=inside)
    tl.store(dv_ptr + into, dv, mask=inside)
    if WITH_DBIAS:
        tl.store(dbias_ptr + part + slot, dbias, mask=slot < c)


@triton.jit
def _query_kernel(
    do_ptr, dlse_ptr, q_ptr, k_ptr, v_ptr, index_ptr, bias_ptr, valid_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr,
    m, c, d, heads, group, scale, rows_per_split,
    sgb, sgh, sgm, sgd, sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    sdb, sdh, sdm, sdd,
    HAS_BIAS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_DLSE: tl.constexpr, EXACT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dq and δ of a run of queries."""
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = head // heads
    q_head = head % heads
    kv_head = q_head // group
    first = (batch * (heads // group) + kv_head) * c
    index_ptr += first
    bias_ptr += first
    valid_ptr += first
    k_ptr += batch * skb + kv_head * skh
    v_ptr += batch * svb + kv_head * svh
    dtype = q_ptr.dtype.element_ty
    lo = split * rows_per_split
    hi = tl.minimum(lo + rows_per_split, m)
    q_ptr += batch * sqb + q_head * sqh + lo.to(tl.int64) * sqm
    do_ptr += batch * sgb + q_head * sgh + lo.to(tl.int64) * sgm
    out_ptr += batch * sob + q_head * soh + lo.to(tl.int64) * som
    dq_ptr += batch * sdb + q_head * sdh + lo.to(tl.int64) * sdm
    scale2 = scale * 1.4426950408889634
    if ONE_BLOCK:
        source, bias, usable = slots(index_ptr, bias_ptr, valid_ptr, 0, c, HAS_BIAS, HAS_VALID, BLOCK_C)
        k = gather(k_ptr, source, usable, skn, skd, d, D)
        v = gather(v_ptr, source, usable, svn, svd, d, D)
    row = tl.arange(0, BLOCK_M)
    col = tl.arange(0, D)
    zero = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(lo, hi, BLOCK_M):
        here = start + row
        inside = (here < hi)[:, None] & (col < d)[None, :]
        q = tl.load(q_ptr + row[:, None] * sqm + col[None, :] * sqd, mask=inside, other=0.0)
        do = tl.load(do_ptr + row[:, None] * sgm + col[None, :] * sgd, mask=inside, other=0.0)
        out = tl.load(out_ptr + row[:, None] * som + col[None, :] * sod, mask=inside, other=0.0)
        lse2 = tl.load(lse_ptr + head * m + here, mask=here < hi, other=float("inf")) * 1.4426950408889634
        delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), axis=1)
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + head * m + here, mask=here < hi, other=0.0)
        tl.store(delta_ptr + head * m + here, delta, mask=here < hi)
        if ONE_BLOCK:
            s = dot(q, tl.trans(k), zero, PRECISION) * scale2
            if EXACT:
                p = tl.exp2(s - lse2[:, None])
            else:
                p = tl.where(usable[None, :], tl.exp2(s + bias[None, :] - lse2[:, None]), 0.0)
            ds = p * (dot(do, tl.trans(v), zero, PRECISION) - delta[:, None])
            dq = dot(ds.to(dtype), k, tl.zeros([BLOCK_M, D], tl.float32), PRECISION)
        else:
            dq = tl.zeros([BLOCK_M, D], tl.float32)
            for c0 in range(0, c, BLOCK_C):
                source, bias, usable = slots(index_ptr, bias_ptr, valid_ptr, c0, c, HAS_BIAS, HAS_VALID, BLOCK_C)
                k = gather(k_ptr, source, usable, skn, skd, d, D)
                v = gather(v_ptr, source, usable, svn, svd, d, D)
                s = dot(q, tl.trans(k), zero, PRECISION) * scale2
                p = tl.where(usable[None, :], tl.exp2(s + bias[None, :] - lse2[:, None]), 0.0)
                ds = p * (dot(do, tl.trans(v), zero, PRECISION) - delta[:, None])
                dq = dot(ds.to(dtype), k, dq, PRECISION)
        tl.store(dq_ptr + row[:, None] * sdm + col[None, :] * sdd, (dq * scale).to(dtype), mask=inside)
        q_ptr += BLOCK_M * sqm
        do_ptr += BLOCK_M * sgm
        out_ptr += BLOCK_M * som
        dq_ptr += BLOCK_M * sdm


@triton.jit
def _scatter_kernel(
    dk_part_ptr, dv_part_ptr, index_ptr, bias_ptr, valid_ptr, dk_ptr, dv_ptr,
    c, d, kv_heads, parts,
    skb, skh, skn, skd, svb, svh, svn, svd,
    HAS_BIAS: tl.constexpr, HAS_VALID: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum the partial gradients of a head's slots, over its query heads and runs, into the rows they came from."""
    head = tl.program_id(1).to(tl.int64)
    batch = head // kv_heads
    kv_head = head % kv_heads
    start = tl.program_id(0) * BLOCK_C
    first = head * c
    source, _, usable = slots(
        index_ptr + first, bias_ptr + first, valid_ptr + first, start, c, HAS_BIAS, HAS_VALID, BLOCK_C
    )
    col = tl.arange(0, D)
    slot = start + tl.arange(0, BLOCK_C)
    inside = usable[:, None] & (col < d)[None, :]
    dk = tl.zeros([BLOCK_C, D], tl.float32)
    dv = tl.zeros([BLOCK_C, D], tl.float32)
    for begin in range(0, parts, 4):
        # Four loads of each in flight, added in order.
        for ahead in tl.static_range(4):
            part = begin + ahead
            at = (head * parts + part) * c * d + slot[:, None] * d + col[None, :]
            dk += tl.load(dk_part_ptr + at, mask=inside & (part < parts), other=0.0)
            dv += tl.load(dv_part_ptr + at, mask=inside & (part < parts), other=0.0)
    dtype = dk_ptr.dtype.element_ty
    to_k = dk_ptr + batch * skb + kv_head * skh + source[:, None] * skn + col[None, :] * skd
    to_v = dv_ptr + batch * svb + kv_head * svh + source[:, None] * svn + col[None, :] * svd
    # An unusable slot may share its row with a usable one, so it must not write.
    tl.store(to_k, dk.to(dtype), mask=inside)
    tl.store(to_v, dv.to(dtype), mask=inside)


def _key_config(c, d, dtype, tight=False):
    """(queries of a tile, slots of a block, warps, stages, programs on a multiprocessor) of `_key_kernel`."""
    padded, wide = padded_dim(d), dtype == torch.float32
    if wide:
        return 16 if tight and padded > 128 else 32, min(32 if padded <= 64 else 16, max(16, next_power(c))), 4, 1, 2
    # At least 64 slots, the rows of one matrix instruction of a group of four warps.
    block_c = min(128 if padded <= 128 else 64, max(64, next_power(c)))
    if padded * block_c <= 64 * 64:
        return 64, block_c, 4, 2, 4
    if tight:
        return (32, 64, 8, 2, 1) if padded <= 128 else (16, 32, 4, 1, 1)
    if padded == 128:
        # More queries in a tile spill once the program also clears dK and dV.
        return 32, block_c, 8, 3, 1
    return 64 if padded < 128 else 32, block_c, 8, 2, 1


def _query_config(c, d, dtype, tight=False):
    """The same of `_query_kernel`."""
    padded, wide = padded_dim(d), dtype == torch.float32
    if wide:
        return 16 if tight and padded > 128 else 32, min(32 if padded <= 64 else 16, max(16, next_power(c))), 4, 1, 2
    block_c = min(128 if padded <= 128 else 64, max(16, next_power(c)))
    if tight and padded > 64:
        return 32, min(64, block_c), 4, 2, 2
    return 64 if padded <= 128 else 32, block_c, 4, 2, 2


@replayed
def _backward(
    grad_out: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    index: torch.Tensor, bias: torch.Tensor | None, valid: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, scale: float, with_dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv, dbias); dbias is empty unless `with_dbias`."""
    b, heads, m, d = q.shape
    kv_heads, c = index.shape[1:]
    if c == 0:
        dbias = bias.new_zeros(bias.shape) if with_dbias and bias is not None else q.new_zeros(0)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dbias
    group = heads // kv_heads
    block_m, block_c, warps, stages, per_sm = _key_config(c, d, q.dtype, small(q))
    blocks = cdiv(c, block_c)
    one_pass = blocks == 1 and block_c * padded_dim(d) <= ONE_PASS
    splits, rows = row_splits(m, b * heads * blocks, block_m, q, per_sm)
    index = index.contiguous()
    grad_lse_data = lse if grad_lse is None else grad_lse.contiguous()
    bias_data = index if bias is None else bias.contiguous()
    valid_data = index if valid is None else valid.contiguous()
    fill = m == k.shape[2] and group == 1 and blocks == 1 and padded_dim(d) <= 128
    dq = torch.empty_like(q)
    dk, dv = (torch.empty_like(k), torch.empty_like(v)) if fill else (torch.zeros_like(k), torch.zeros_like(v))
    dk_part = q.new_empty((b * heads, splits, c, d), dtype=torch.float32)
    dv_part = torch.empty_like(dk_part)
    dbias_part = q.new_empty((b, kv_heads, group * splits, c) if with_dbias else (0,), dtype=torch.float32)
    delta = lse if one_pass else torch.empty_like(lse)
    flags = {"HAS_BIAS": bias is not None, "HAS_VALID": valid is not None, "HAS_DLSE": grad_lse is not None}
    plain = bias is None and valid is None
    tensors = (grad_out, grad_lse_data, q, k, v, index, bias_data, valid_data, out, lse, delta)
    strides = [s for t in (grad_out, q, k, v, out, dq) for s in t.stride()]
    shape = {"PRECISION": precision(q.dtype), "D": padded_dim(d)}
    sizes = (m, c, d, heads, group, scale)
    if not one_pass:
        q_block_m, q_block_c, q_warps, q_stages, q_per_sm = _query_config(c, d, q.dtype, small(q))
        q_splits, q_rows = row_splits(m, b * heads, q_block_m, q, q_per_sm)
        launch(
            _query_kernel, (q_splits, b * heads), (*tensors, dq), (*sizes, q_rows, *strides),
            dict(**flags, **shape, EXACT=plain and c == q_block_c, ONE_BLOCK=c <= q_block_c,
                 BLOCK_M=q_block_m, BLOCK_C=q_block_c),
            warps=q_warps, stages=q_stages,
        )  # fmt: skip
    launch(
        _key_kernel, (splits, blocks, b * heads), (*tensors, dq, dk_part, dv_part, dbias_part, dk, dv),
        (*sizes, rows, *strides, *dk.stride(), *dv.stride()),
        dict(**flags, **shape, EXACT=plain and c % block_c == 0, WITH_DQ=one_pass, FILL=fill, WITH_DBIAS=with_dbias,
             BLOCK_M=block_m, BLOCK_C=block_c),
        warps=warps, stages=stages,
    )  # fmt: skip
    del flags["HAS_DLSE"]
    launch(
        _scatter_kernel, (cdiv(c, 8), b * kv_heads), (dk_part, dv_part, index, bias_data, valid_data, dk, dv),
        (c, d, kv_heads, group * splits, *dk.stride(), *dv.stride()),
        dict(**flags, D=padded_dim(d), BLOCK_C=8), warps=4,
    )  # fmt: skip
    dbias = dbias_part if bias is None or not with_dbias else dbias_part.sum(2).to(bias.dtype)
    return dq, dk, dv, dbias


_backward_op = torch.library.custom_op("levattention::gathered_attention_backward", _backward, mutates_args=())


@_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, index, bias, valid, out, lse, scale, with_dbias):
    dbias = bias.new_empty(bias.shape) if with_dbias else q.new_empty((0,), dtype=torch.float32)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dbias


def backward(grad_out, *args):
    """(dq, dk, dv, dbias), dbias empty unless asked for; the arguments are those of the registered operator."""
    return (_backward if eager(grad_out) else _backward_op)(grad_out, *args)
