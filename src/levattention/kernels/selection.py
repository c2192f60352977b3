"""The positions of the k largest scores, without a sort of n.

Scores are non-negative, so their bits compare as integers: the k-th largest is found bit by bit, by counting how many
scores reach a candidate, and the winners are compacted by a prefix sum. Ties go to the smaller position. Long rows are
cut into tiles; each tile passes its own k best to the next round, so the scores are read once.
"""

import torch
import triton
import triton.language as tl

from . import MAX_SET
from .common import cdiv, eager, launch, next_power

# The most values one program holds in registers.
TILE = 4096
LAST_TILE = 8192


@triton.jit
def sortable(score, inside):
    """Integers in the order of the scores; masked rows (−inf, or any negative) come after 0, padding after those."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(inside, tl.where(score >= 0, bits, -1), -2)


@triton.jit
def kth_largest(key, k):
    """The k-th largest of `key`, at least −2: the largest t with #{key ≥ t} ≥ k."""
    reached = tl.sum((key >= 0).to(tl.int32), axis=0) >= k
    real = tl.sum((key >= -1).to(tl.int32), axis=0) >= k
    t = tl.where(reached, 0, tl.where(real, -1, -2))
    high = tl.full([], 1 << 30, tl.int32)
    t = tl.where(reached & (tl.sum((key >= high).to(tl.int32), axis=0) >= k), high, t)
    # Two bits at a time: the three counts of a round share one sum, 20 bits each.
    for i in range(15):
        step = tl.full([], 1, tl.int32) << (28 - 2 * i)
        one = (key >= t + step).to(tl.int64)
        two = (key >= t + 2 * step).to(tl.int64)
        three = (key >= t + 3 * step).to(tl.int64)
        count = tl.sum(one + (two << 20) + (three << 40), axis=0)
        enough = ((count & 0xFFFFF) >= k).to(tl.int32)
        enough += (((count >> 20) & 0xFFFFF) >= k).to(tl.int32) + ((count >> 40) >= k).to(tl.int32)
        t = tl.where(reached, t + enough * step, t)
    return t


@triton.jit
def placed(above, equal, room):
    """(chosen, slot): all that are `above` and the first `room` of the `equal` ones, each in its place among them."""
    # Both counts in one prefix sum: a tile has fewer than 2¹⁵ elements.
    count = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    equals = count >> 16
    chosen = above | (equal & (equals <= room))
    slot = (count & 0xFFFF) + tl.minimum(equals, room) - 1
    return chosen, slot


@triton.jit
def winners(key, k):
    """(chosen, slot): which elements are the k largest, earlier ones first among equals, and their place."""
    t = kth_largest(key, k)
    above = key > t
    return placed(above, key == t, k - tl.sum(above.to(tl.int32), axis=0))


@triton.jit
def winners_near(key, k, guess):
    """`winners` of at least k scores (or −1s) of at most 1, and a threshold that splits them off: the next guess.

    For a program that chooses again and again, waiting for one sum after the other: a guess near the threshold and an
    end as soon as exactly k elements reach it leave 4 to 6 sums of the 19, and 32 bits add up faster than 64.
    """
    # What three counts of up to the tile's length fit in.
    WIDTH: tl.constexpr = 10 if key.shape[0] < 1024 else 20
    COUNT: tl.constexpr = tl.int32 if key.shape[0] < 1024 else tl.int64
    low = tl.full([], -2, tl.int32)
    high = tl.full([], 0x3F800001, tl.int32)
    reach = tl.full([], key.shape[0], tl.int32)
    above = tl.full([], 0, tl.int32)
    one = tl.maximum(guess - (1 << 22), low)
    two = tl.maximum(guess - (1 << 20), low)
    three = tl.minimum(guess + (1 << 18), high)
    # `reach` elements reach low, at least k; `above` reach high, fewer than k.
    # The first three thresholds lie about the guess, later ones cut what is left in four.
    while (reach > k) & (high - low > 1):
        count = (key >= one).to(COUNT) + ((key >= two).to(COUNT) << WIDTH) + ((key >= three).to(COUNT) << 2 * WIDTH)
        count = tl.sum(count, axis=0)
        first = (count & ((1 << WIDTH) - 1)).to(tl.int32)
        second = ((count >> WIDTH) & ((1 << WIDTH) - 1)).to(tl.int32)
        third = (count >> 2 * WIDTH).to(tl.int32)
        above = tl.where(first < k, first, tl.where(second < k, second, tl.where(third < k, third, above)))
        high = tl.where(first < k, one, tl.where(second < k, two, tl.where(third < k, three, high)))
        reach = tl.where(third >= k, third, tl.where(second >= k, second, tl.where(first >= k, first, reach)))
        low = tl.where(third >= k, three, tl.where(second >= k, two, tl.where(first >= k, one, low)))
        quarter = (high - low + 3) >> 2
        one = low + quarter
        two = tl.minimum(one + quarter, high)
        three = tl.minimum(two + quarter, high)
    chosen, slot = placed(key >= high, (key >= low) & (key < high), k - above)
    return chosen, slot, low


@triton.jit
def best_first(key_ptr, position_ptr, out_ptr, k, K: tl.constexpr, BLOCK: tl.constexpr):
    """Write the k positions in the order of their keys, by counting for each how many come before it."""
    slot = tl.arange(0, K)
    key = tl.load(key_ptr + slot, mask=slot < k, other=-2)
    position = tl.load(position_ptr + slot, mask=slot < k, other=0)
    rank = tl.zeros([K], tl.int32)
    for start in range(0, k, BLOCK):
        other = start + tl.arange(0, BLOCK)
        other_key = tl.load(key_ptr + other, mask=other < k, other=-3)
        earlier = (other_key[None, :] == key[:, None]) & (other[None, :] < slot[:, None])
        rank += tl.sum(((other_key[None, :] > key[:, None]) | earlier).to(tl.int32), axis=1)
    tl.store(out_ptr + rank, position.to(tl.int64), mask=slot < k)


@triton.jit
def _round_kernel(
    value_ptr, position_ptr, key_out_ptr, position_out_ptr, index_ptr,
    n, k, emit,
    FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    if FIRST:
        key = sortable(tl.load(value_ptr + head * n + at, mask=at < n, other=0.0), at < n)
        position = at
    else:
        key = tl.load(value_ptr + head * n + at, mask=at < n, other=-2)
        position = tl.load(position_ptr + head * n + at, mask=at < n, other=0)
    chosen, slot = winners(key, emit)
    out = (head * tl.num_programs(0) + tile) * emit
    tl.store(key_out_ptr + out + slot, key, mask=chosen)
    tl.store(position_out_ptr + out + slot, position, mask=chosen)
    if LAST:
        tl.debug_barrier()
        best_first(key_out_ptr + out, position_out_ptr + out, index_ptr + head * k, k, K, 16)


def _plain(scores, k):
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


def _rounds(scores, k, ordered):
    """The k best of each row, found tile by tile: their positions best first, or keys and positions by position."""
    n = scores.shape[-1]
    rows = scores.numel() // n
    values = scores.contiguous()
    index = scores.new_empty((rows, k), dtype=torch.int64)
    positions, first = index, True
    while True:
        last = n <= LAST_TILE
        block = max(16, next_power(n)) if last else TILE if k <= TILE // 8 else 2 * LAST_TILE
        tiles = cdiv(n, block)
        # A short last tile pads with −2 keys, which lose to every real row in the next round.
        out_keys = values.new_empty((rows, tiles, k), dtype=torch.int32)
        out_positions = torch.empty_like(out_keys)
        launch(
            _round_kernel, (tiles, rows), (values, positions, out_keys, out_positions, index), (n, k, k),
            {"FIRST": first, "LAST": last and ordered, "BLOCK": block, "K": max(16, next_power(k))},
            warps=8 if block > 2048 else 4,
        )  # fmt: skip
        if last:
            return index if ordered else (out_keys, out_positions)
        values, positions, first, n = out_keys, out_positions, False, tiles * k


def contenders(scores, k):
    """(keys, positions) of the k best of each row, both (rows, 1, k) int32, in the order of positions."""
    return _rounds(scores, k, ordered=False)


def _top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    if k > MAX_SET:
        return _plain(scores, k).contiguous()
    return _rounds(scores, k, ordered=True).view(*scores.shape[:-1], k)


_top_k_op = torch.library.custom_op("levattention::top_k", _top_k, mutates_args=())


@_top_k_op.register_fake
def _(scores, k):
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int64)


def top_k(scores, k):
    """The positions of the k largest scores, best first, the smaller position first among equals.

    Args:
        scores: (*batch, n) fp32, non-negative; −inf marks rows that come after every other one.
        k: 1 ≤ k ≤ n.

    Returns:
        (*batch, k) int64, the same on every call.

    Raises:
        ValueError: k is not between 1 and n.
    """
    if not 1 <= k <= scores.shape[-1]:
        raise ValueError(f"k must be between 1 and n = {scores.shape[-1]}, got {k}")
    return (_top_k if eager(scores) else _top_k_op)(scores, k)
