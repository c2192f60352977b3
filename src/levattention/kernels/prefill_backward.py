"""Gradients of causal attention over local keys and sets, without atomics: the same inputs give the same bits.

Three kernels. One walks as the forward does and writes dq and δ = Σ do·o − dlse. One takes a block of a chunk's slots
over the queries of that chunk; a key may be in the sets of many chunks, so its sums go to scratch memory, linear in n.
The last takes a tile of keys over the queries they are local to, adds what the slots of its keys have gathered, by a
product with the 0/1 matrix of which slot belongs to which key, and writes every row of dK and dV once.
"""

import torch
import triton
import triton.language as tl

from .chunks import local_run, odd_tile, sees, set_tile, tile_of, turn_of
from .common import cdiv, dot, eager, launch, next_power, padded_dim, precision, small


@triton.jit
def _dq(q, k, v, do, lse2, delta, seen, dq, scale2, PRECISION: tl.constexpr):
    """dq with some more keys in; lse2 is +∞ where there is no query."""
    zero = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    p = tl.exp2(dot(q, tl.trans(k), zero, PRECISION) * scale2 - lse2[:, None])
    # A query that sees nothing has lse −inf; the mask, not the exponential, gives its zeros.
    p = tl.where(seen, p, 0.0)
    ds = p * (dot(do, tl.trans(v), zero, PRECISION) - delta[:, None])
    return dot(ds.to(k.dtype), k, dq, PRECISION)


@triton.jit
def _query_kernel(
    do_ptr, dlse_ptr, q_ptr, k_ptr, v_ptr, index_ptr, valid_ptr, mask_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr,
    m, n, c, d, heads, group, chunk, reach, scale, set_stride, set_step,
    sgb, sgh, sgm, sgd, sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    sdb, sdh, sdm, sdd, smb, smh, smn,
    HAS_MASK: tl.constexpr, HAS_DLSE: tl.constexpr, PRECISION: tl.constexpr,
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
    do_ptr += batch * sgb + q_head * sgh + lo.to(tl.int64) * sgm
    out_ptr += batch * sob + q_head * soh + lo.to(tl.int64) * som
    dq_ptr += batch * sdb + q_head * sdh + lo.to(tl.int64) * sdm
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
    real = lo + row < hi
    inside = real[:, None] & (col < d)[None, :]
    q = tl.load(q_ptr + row[:, None] * sqm + col[None, :] * sqd, mask=inside, other=0.0)
    do = tl.load(do_ptr + row[:, None] * sgm + col[None, :] * sgd, mask=inside, other=0.0)
    out = tl.load(out_ptr + row[:, None] * som + col[None, :] * sod, mask=inside, other=0.0)
    lse2 = tl.load(lse_ptr + head * m + lo + row, mask=real, other=float("inf")) * 1.4426950408889634
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), axis=1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + head * m + lo + row, mask=real, other=0.0)
    tl.store(delta_ptr + head * m + lo + row, delta, mask=real)
    scale2 = scale * 1.4426950408889634
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    start, full, edge, odd, ahead = local_run(first, last, before, reach, HAS_MASK, BLOCK_N)
    for at in range(full.to(tl.int64), edge, BLOCK_N):
        k = tile_of(k_ptr, at, (col < d)[None, :], skn, skd, D, BLOCK_N)
        v = tile_of(v_ptr, at, (col < d)[None, :], svn, svd, D, BLOCK_N)
        dq = _dq(q, k, v, do, lse2, delta, real[:, None], dq, scale2, PRECISION)
    for tile in range(0, odd):
        k, v, seen = odd_tile(
            tile, start, edge, ahead, k_ptr, v_ptr, mask_ptr, here, last, before, reach,
            d, skn, skd, svn, svd, smn, HAS_MASK, D, BLOCK_N,
        )  # fmt: skip
        dq = _dq(q, k, v, do, lse2, delta, seen, dq, scale2, PRECISION)
    for c0 in range(0, tl.where(before > 0, c, 0), BLOCK_C):
        k, v, source, usable = set_tile(
            c0, c, k_ptr, v_ptr, index_ptr, valid_ptr, before, d, skn, skd, svn, svd, D, BLOCK_C
        )
        seen = usable[None, :] & (here[:, None] - source[None, :] > reach)
        dq = _dq(q, k, v, do, lse2, delta, seen, dq, scale2, PRECISION)
    tl.store(dq_ptr + row[:, None] * sdm + col[None, :] * sdd, (dq * scale).to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _queries(
    at, end, q_ptr, do_ptr, lse_ptr, delta_ptr, d, sqm, sqd, sgm, sgd, D: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """(q, do, lse in log2 units, δ) of the queries from `at` on, before `end`."""
    line = at + tl.arange(0, BLOCK_M)
    real = line < end
    inside = real[:, None] & (tl.arange(0, D) < d)[None, :]
    q = tile_of(q_ptr, at, inside, sqm, sqd, D, BLOCK_M)
    do = tile_of(do_ptr, at, inside, sgm, sgd, D, BLOCK_M)
    lse2 = tl.load(lse_ptr + line, mask=real, other=float("inf")) * 1.4426950408889634
    return q, do, lse2, tl.load(delta_ptr + line, mask=real, other=0.0)


@triton.jit
def _dkv(k, v, q, do, lse2, delta, seen, dk, dv, scale2, PRECISION: tl.constexpr):
    """dk and dv with some more queries in. Keys by queries: the sums over queries then take these tiles as they are."""
    zero = tl.zeros([k.shape[0], q.shape[0]], tl.float32)
    p = tl.exp2(dot(k, tl.trans(q), zero, PRECISION) * scale2 - lse2[None, :])
    p = tl.where(seen, p, 0.0)
    dv = dot(p.to(q.dtype), do, dv, PRECISION)
    ds = p * (dot(v, tl.trans(do), zero, PRECISION) - delta[None, :])
    return dot(ds.to(q.dtype), q, dk, PRECISION), dv


@triton.jit
def _slot_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, index_ptr, valid_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    m, n, c, d, kv_heads, group, chunk, reach, scale, set_stride, set_step,
    sgb, sgh, sgm, sgd, sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dk/scale and dv of a block of one chunk's slots, summed over the chunk's queries of all heads of the group."""
    blocks = tl.cdiv(c, BLOCK_C)
    turn = tl.program_id(0) // blocks
    head = tl.program_id(1).to(tl.int64)
    batch = head // kv_heads
    kv_head = head % kv_heads
    before = turn * chunk + n - m
    hi = tl.minimum((turn + 1) * chunk, m)
    c0 = tl.program_id(0) % blocks * BLOCK_C
    own = head * set_stride + turn.to(tl.int64) * set_step
    k, v, source, usable = set_tile(
        c0, c, k_ptr + batch * skb + kv_head * skh, v_ptr + batch * svb + kv_head * svh, index_ptr + own,
        valid_ptr + own, before, d, skn, skd, svn, svd, D, BLOCK_C,
    )  # fmt: skip
    q_ptr += batch * sqb + kv_head * group * sqh
    do_ptr += batch * sgb + kv_head * group * sgh
    row = tl.arange(0, BLOCK_M)
    col = tl.arange(0, D)
    dk = tl.zeros([BLOCK_C, D], tl.float32)
    dv = tl.zeros([BLOCK_C, D], tl.float32)
    tiles = tl.cdiv(hi - turn * chunk, BLOCK_M)
    for tile in range(0, group * tiles):
        of = (tile // tiles).to(tl.int64)
        at = (turn * chunk + tile % tiles * BLOCK_M).to(tl.int64)
        q, do, lse2, delta = _queries(
            at, hi, q_ptr + of * sqh, do_ptr + of * sgh, lse_ptr + (head * group + of) * m,
            delta_ptr + (head * group + of) * m, d, sqm, sqd, sgm, sgd, D, BLOCK_M,
        )  # fmt: skip
        here = at.to(tl.int32) + row + n - m
        seen = usable[:, None] & (here[None, :] - source[:, None] > reach)
        dk, dv = _dkv(k, v, q, do, lse2, delta, seen, dk, dv, scale * 1.4426950408889634, PRECISION)
    slot = c0 + tl.arange(0, BLOCK_C)
    into = (head * tl.cdiv(m, chunk) + turn) * c * d + slot[:, None] * d + col[None, :]
    tl.store(dk_ptr + into, dk, mask=(slot < c)[:, None] & (col < d)[None, :])
    tl.store(dv_ptr + into, dv, mask=(slot < c)[:, None] & (col < d)[None, :])


@triton.jit
def _key_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, lse_ptr, delta_ptr,
    dk_part_ptr, dv_part_ptr, owner_ptr, slot_ptr, edge_ptr, dk_ptr, dv_ptr,
    m, n, d, kv_heads, group, chunk, reach, scale, all_slots,
    sgb, sgh, sgm, sgd, sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd,
    sdb, sdh, sdn, sdd, sub, suh, sun, sud, smb, smh, smn,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys: over the queries they are local to, and from the slots that hold them."""
    head = tl.program_id(1).to(tl.int64)
    batch = head // kv_heads
    kv_head = head % kv_heads
    first = tl.program_id(0) * BLOCK_N
    step = tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    col = tl.arange(0, D)
    key = first + step
    inside = key < n
    seen_key = inside
    if HAS_MASK:
        mask_ptr += batch * smb + kv_head * smh
        seen_key = inside & (tl.load(mask_ptr + key.to(tl.int64) * smn, mask=inside, other=0) != 0)
    begin = first.to(tl.int64)
    wanted = seen_key[:, None] & (col < d)[None, :]
    k = tile_of(k_ptr + batch * skb + kv_head * skh, begin, wanted, skn, skd, D, BLOCK_N)
    v = tile_of(v_ptr + batch * svb + kv_head * svh, begin, wanted, svn, svd, D, BLOCK_N)
    q_ptr += batch * sqb + kv_head * group * sqh
    do_ptr += batch * sgb + kv_head * group * sgh
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)

    # Seen by the queries up to the end of the last key's chunk, or as far as the window reaches.
    shift = n - m
    last = tl.minimum(first + BLOCK_N, n) - 1 - shift
    start = tl.maximum(first - shift, 0)
    stop = tl.maximum(last + reach + 1, tl.where(last >= 0, (last // chunk + 1) * chunk, 0))
    tiles = tl.cdiv(tl.maximum(tl.minimum(stop, m) - start, 0), BLOCK_M)
    for tile in range(0, group * tiles):
        of = (tile // tiles).to(tl.int64)
        at = (start + tile % tiles * BLOCK_M).to(tl.int64)
        q, do, lse2, delta = _queries(
            at, m, q_ptr + of * sqh, do_ptr + of * sgh, lse_ptr + (head * group + of) * m,
            delta_ptr + (head * group + of) * m, d, sqm, sqd, sgm, sgd, D, BLOCK_M,
        )  # fmt: skip
        query = at.to(tl.int32) + row
        before = query // chunk * chunk + shift
        seen = sees((query + shift)[None, :], key[:, None], before[None, :], reach) & seen_key[:, None]
        dk, dv = _dkv(k, v, q, do, lse2, delta, seen, dk, dv, scale * 1.4426950408889634, PRECISION)

    edge_ptr += head * (tl.num_programs(0) + 1) + tl.program_id(0)
    owner_ptr += head * all_slots
    slot_ptr += head * all_slots
    dk_part_ptr += head * all_slots * d
    dv_part_ptr += head * all_slots * d
    end = tl.load(edge_ptr + 1)
    for at in range(tl.load(edge_ptr), end, BLOCK_E):
        place = at + tl.arange(0, BLOCK_E)
        some = place < end
        owner = tl.load(owner_ptr + place, mask=some, other=-1)
        slot = tl.load(slot_ptr + place, mask=some, other=0)
        belongs = (owner[None, :] == key[:, None]).to(tl.float32)
        of = slot[:, None] * d + col[None, :]
        dk_part = tl.load(dk_part_ptr + of, mask=some[:, None] & (col < d)[None, :], other=0.0)
        dv_part = tl.load(dv_part_ptr + of, mask=some[:, None] & (col < d)[None, :], other=0.0)
        dk = dot(belongs, dk_part, dk, "tf32x3")
        dv = dot(belongs, dv_part, dv, "tf32x3")
    dtype = k_ptr.dtype.element_ty
    dk_ptr += batch * sdb + kv_head * sdh + begin * sdn
    dv_ptr += batch * sub + kv_head * suh + begin * sun
    inside = inside[:, None] & (col < d)[None, :]
    tl.store(dk_ptr + step[:, None] * sdn + col[None, :] * sdd, (dk * scale).to(dtype), mask=inside)
    tl.store(dv_ptr + step[:, None] * sun + col[None, :] * sud, dv.to(dtype), mask=inside)


def _query_config(c, chunk, d, dtype, tight=False):
    """(queries of a tile, keys of a tile, slots of a block, warps, stages) of `_query_kernel`."""
    padded, wide = padded_dim(d), dtype == torch.float32
    if wide:
        queries, keys, warps, stages = (32, 32, 4, 1) if padded <= 64 else (32 if padded == 128 else 16, 16, 8, 1)
    else:
        queries, keys, warps, stages = (64, 64, 4, 2) if padded <= 128 else (32 if tight else 64, 32, 8, 2)
    return min(queries, max(16, next_power(chunk))), keys, min(keys, max(16, next_power(c))), warps, stages


def _key_config(d, dtype):
    """(queries of a tile, keys or slots of a tile, warps, stages) of `_key_kernel` and `_slot_kernel`."""
    padded, wide = padded_dim(d), dtype == torch.float32
    if wide:
        return (32, 32, 4, 1) if padded <= 64 else (16, 16, 8, 1)
    return (64, 128, 8, 2) if padded <= 64 else (32, 64, 8, 2) if padded == 128 else (32, 32, 8, 2)


def _owners(index, valid, m, n, chunk, tile):
    """Which slots hold the keys of each tile: (key, slot) of all slots in the order of keys, and where tiles begin."""
    before = torch.arange(index.shape[2], device=index.device) * chunk + (n - m)
    usable = valid & (index < before[:, None])
    owner, slot = torch.where(usable, index, n).flatten(2).sort(dim=-1, stable=True)
    edges = torch.arange(0, n + tile, tile, device=index.device).clamp(max=n)
    return owner, slot, torch.searchsorted(owner, edges.expand(*owner.shape[:2], -1).contiguous())


def _backward(
    grad_out: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    index: torch.Tensor, valid: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
    chunk: int, reach: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv)."""
    b, heads, m, d = q.shape
    kv_heads, n = k.shape[1:3]
    group = heads // kv_heads
    sets, c = index.shape[2:]
    chunks = cdiv(m, chunk)
    index, valid = index.contiguous(), valid.contiguous()
    dlse = lse if grad_lse is None else grad_lse.contiguous()
    seen = k[..., 0] if mask is None else mask.expand(k.shape[:3])
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    shape = {"PRECISION": precision(q.dtype), "D": padded_dim(d)}
    set_strides = sets * c, c if sets > 1 else 0
    strides = [s for t in (grad_out, q, k, v) for s in t.stride()]

    block_m, block_n, block_c, warps, stages = _query_config(c, chunk, d, q.dtype, small(q))
    launch(
        _query_kernel, (chunks * cdiv(chunk, block_m), b * heads),
        (grad_out, dlse, q, k, v, index, valid, seen, out, lse, delta, dq),
        (m, n, c, d, heads, group, chunk, reach, scale, *set_strides,
         *strides, *out.stride(), *dq.stride(), *seen.stride()),
        dict(**shape, HAS_MASK=mask is not None, HAS_DLSE=grad_lse is not None,
             BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_C=block_c),
        warps=warps, stages=stages,
    )  # fmt: skip
    block_m, block_n, warps, stages = _key_config(d, q.dtype)
    dk_part = q.new_empty((b * kv_heads, chunks * c, d), dtype=torch.float32)
    dv_part = torch.empty_like(dk_part)
    block_c = min(block_n, max(16, next_power(c)))
    launch(
        _slot_kernel, (chunks * cdiv(c, block_c), b * kv_heads),
        (grad_out, q, k, v, index, valid, lse, delta, dk_part, dv_part),
        (m, n, c, d, kv_heads, group, chunk, reach, scale, *set_strides, *strides),
        dict(**shape, BLOCK_M=block_m, BLOCK_C=block_c), warps=warps, stages=stages,
    )  # fmt: skip
    every = (b, kv_heads, chunks, c)
    owner, slot, edges = _owners(index.expand(every), valid.expand(every), m, n, chunk, block_n)
    launch(
        _key_kernel, (cdiv(n, block_n), b * kv_heads),
        (grad_out, q, k, v, seen, lse, delta, dk_part, dv_part, owner, slot, edges, dk, dv),
        (m, n, d, kv_heads, group, chunk, reach, scale, chunks * c,
         *strides, *dk.stride(), *dv.stride(), *seen.stride()),
        dict(**shape, HAS_MASK=mask is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_E=16),
        warps=warps, stages=stages,
    )  # fmt: skip
    return dq, dk, dv


_backward_op = torch.library.custom_op("levattention::causal_attention_backward", _backward, mutates_args=())


@_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, index, valid, mask, out, lse, chunk, reach, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def backward(grad_out, *args):
    """(dq, dk, dv); the arguments are those of the registered operator."""
    return (_backward if eager(grad_out) else _backward_op)(grad_out, *args)
