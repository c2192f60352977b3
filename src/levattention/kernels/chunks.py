"""The tiles that causal attention's kernels walk over: a chunk's queries, their local keys, the slots of their set.

Query t stands at i = t + n − m. With `before` the first position of its chunk, it sees key j ≤ i if j ≥ before or
i − j ≤ reach, and of its chunk's set the keys j < before that are not that near, so that no key counts twice.
"""

import triton
import triton.language as tl

from .slots import gather, slots


@triton.jit
def turn_of(m, chunk, BLOCK_M: tl.constexpr):
    """(chunk, first query, end of its queries) of this program, which has a tile of one chunk; maybe an empty one."""
    tiles = tl.cdiv(chunk, BLOCK_M)
    turn = tl.program_id(0) // tiles
    return turn, turn * chunk + tl.program_id(0) % tiles * BLOCK_M, tl.minimum((turn + 1) * chunk, m)


@triton.jit
def sees(here, key, before, reach):
    """Which keys are local to which queries, by position."""
    distance = here - key
    return (distance >= 0) & ((key >= before) | (distance <= reach))


@triton.jit
def local_run(first, last, before, reach, HAS_MASK: tl.constexpr, BLOCK_N: tl.constexpr):
    """(start, full, edge, odd, ahead): the tiles of keys local to queries first … last of one chunk.

    They begin at `start`. Every query sees the whole of those from `full` to `edge`; the `odd` others need a mask, and
    `ahead` of them lie before those.
    """
    start = tl.maximum(tl.minimum(before, first - reach), 0)
    full = start + tl.cdiv(tl.maximum(tl.minimum(before, last - reach) - start, 0), BLOCK_N) * BLOCK_N
    edge = tl.maximum(start + (first + 1 - start) // BLOCK_N * BLOCK_N, full)
    if HAS_MASK:
        full = start
        edge = start
    ahead = tl.cdiv(tl.minimum(full, last + 1) - start, BLOCK_N)
    return start, full, edge, ahead + tl.cdiv(tl.maximum(last + 1 - edge, 0), BLOCK_N), ahead


@triton.jit
def tile_of(ptr, at, inside, stride_n, stride_d, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows at … at + BLOCK_N. 64 bits to the first of them, so that offsets inside a tile fit in 32."""
    offsets = tl.arange(0, BLOCK_N)[:, None] * stride_n + tl.arange(0, D)[None, :] * stride_d
    return tl.load(ptr + at * stride_n + offsets, mask=inside, other=0.0)


@triton.jit
def odd_tile(
    tile, start, edge, ahead, k_ptr, v_ptr, mask_ptr, here, last, before, reach,
    d, skn, skd, svn, svd, smn,
    HAS_MASK: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(keys, values, which queries see which) of one of the odd local tiles; what no query sees is not read."""
    at = tl.where(tile < ahead, start + tile * BLOCK_N, edge + (tile - ahead) * BLOCK_N).to(tl.int64)
    step = tl.arange(0, BLOCK_N)
    key = at.to(tl.int32) + step
    real = key <= last
    if HAS_MASK:
        real = real & (tl.load(mask_ptr + (at + step) * smn, mask=real, other=0) != 0)
    inside = real[:, None] & (tl.arange(0, D) < d)[None, :]
    k = tile_of(k_ptr, at, inside, skn, skd, D, BLOCK_N)
    v = tile_of(v_ptr, at, inside, svn, svd, D, BLOCK_N)
    return k, v, sees(here[:, None], key[None, :], before, reach) & real[None, :]


@triton.jit
def set_tile(
    c0, c, k_ptr, v_ptr, index_ptr, valid_ptr, before, d, skn, skd, svn, svd, D: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """(keys, values, their positions, usable) of a block of a chunk's slots."""
    source, _, usable = slots(index_ptr, index_ptr, valid_ptr, c0, c, False, True, BLOCK_C)
    usable = usable & (source < before)
    k = gather(k_ptr, source, usable, skn, skd, d, D)
    v = gather(v_ptr, source, usable, svn, svd, d, D)
    return k, v, source.to(tl.int32), usable
