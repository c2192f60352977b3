"""The set of every prefix of a sequence, S ← top-k(S ∪ chunk) by the leverage of the prefix, without a launch a chunk.

Only the choice itself has to go chunk by chunk. The Grams of all prefixes, their factors, and the scores of each
chunk's keys against its own prefix do not depend on the sets, so they come first, all chunks at once; of each chunk
only its k best keys go on, for no other can enter. What is left for the recurrence, one program a head, is to score
the k held keys against the new prefix and to take the k best of 2k.
"""

import torch
import triton
import triton.language as tl

from . import MAX_SET
from .common import cdiv, eager, launch, next_power, padded_dim, precision, small
from .factor import whiten
from .gram_matrix import gram, prefix_grams
from .scores import leverage, split_whitening, squares
from .selection import contenders, sortable, top_k, winners
from .slots import gather

# Bytes that the Grams, their partial sums and factors may take at once; a longer sequence goes in stretches.
SCRATCH = 1 << 28


@triton.jit
def _running_kernel(
    k_ptr, p_ptr, key_ptr, position_ptr, score_ptr, index_ptr, valid_ptr,
    k, fresh, d, heads, chunks, first, chunk, begin, steps,
    skb, skh, skn, skd,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the set at `begin`, the next `steps` sets of a head. A set lies in the order of positions.

    So the candidates do too, and equal scores go to the smaller position. The program hands over to itself through
    memory that it alone touches; the barriers order its threads.
    """
    head = tl.program_id(0).to(tl.int64)
    k_ptr += head // heads * skb + head % heads * skh
    p_ptr += head * steps * d * d
    key_ptr += head * steps * fresh
    position_ptr += head * steps * fresh
    score_ptr += head * k
    index_ptr += (head * chunks + begin) * k
    valid_ptr += (head * chunks + begin) * k
    col = tl.arange(0, D)
    rank = tl.arange(0, BLOCK)
    held = rank < k
    new = (rank >= k) & (rank < k + fresh)
    for step in range(0, steps):
        # One block of P's columns at a time, as where all keys are scored.
        for j0 in tl.static_range(0, D, BLOCK_J):
            j = j0 + tl.arange(0, BLOCK_J)
            p = tl.load(p_ptr + col[:, None] * d + j[None, :], mask=(col < d)[:, None] & (j < d)[None, :], other=0.0)
            high, low, unscale = split_whitening(p, k_ptr.dtype.element_ty) if SPLIT else (p, p, p)
            for start in range(0, k, BLOCK_R):
                slot = start + tl.arange(0, BLOCK_R)
                usable = tl.load(valid_ptr + slot, mask=slot < k, other=0) != 0
                row = tl.load(index_ptr + slot, mask=slot < k, other=0)
                x = gather(k_ptr, row, usable, skn, skd, d, D)
                score = squares(x, p, high, low, unscale, SPLIT, PRECISION)
                if j0 > 0:
                    score += tl.load(score_ptr + slot, mask=slot < k, other=0.0)
                if j0 + BLOCK_J >= D:
                    score = tl.where(usable, tl.minimum(score, 1.0), float("-inf"))
                tl.store(score_ptr + slot, score, mask=slot < k)
            tl.debug_barrier()
        key = sortable(tl.load(score_ptr + rank, mask=held, other=0.0), held)
        key = tl.where(new, tl.load(key_ptr + rank - k, mask=new, other=-2), key)
        position = tl.load(position_ptr + rank - k, mask=new, other=0) + (first + (begin + step) * chunk)
        position = tl.where(held, tl.load(index_ptr + rank, mask=held, other=0), position)
        chosen, slot = winners(key, k)
        index_ptr += k
        valid_ptr += k
        tl.store(index_ptr + slot, tl.where(key >= 0, position, 0), mask=chosen)
        tl.store(valid_ptr + slot, (key >= 0).to(tl.int8), mask=chosen)
        tl.debug_barrier()
        p_ptr += d * d
        key_ptr += fresh
        position_ptr += fresh


def _config(k, d, dtype, tight=False):
    """(columns of P in a block, held keys in a tile, warps, stages)."""
    padded, rows = padded_dim(d), max(16, next_power(k))
    if dtype == torch.float32:
        return min(padded, 64 if padded <= 128 else 32), min(32 if tight and padded > 128 else 64, rows), 4, 1
    return min(padded, 128 if padded <= 128 else 64), min(64 if tight and padded > 128 else 128, rows), 8, 1


def _running(
    keys: torch.Tensor, k: int, first: int, chunk: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    b, h, n, d = keys.shape
    chunks = cdiv(n - first, chunk)
    index = torch.zeros((b, h, chunks, k), dtype=torch.int64, device=keys.device)
    valid = torch.zeros((b, h, chunks, k), dtype=torch.bool, device=keys.device)
    if mask is not None:
        mask = mask.expand(b, h, n)

    def seen(start, stop):
        return None if mask is None else mask[..., start:stop]

    if first:
        prefix, hidden = keys[..., :first, :], seen(0, first)
        base = gram(prefix, hidden)
        scores = leverage(prefix, whiten(base), hidden)
        found = top_k(scores, min(k, first)).sort(-1).values
        real = scores.gather(-1, found) >= 0
        index[..., 0, : found.shape[-1]], valid[..., 0, : found.shape[-1]] = found * real, real
    else:
        base = torch.zeros((b, h, d, d), dtype=torch.float64, device=keys.device)
    fresh = min(k, chunk)
    block_j, block_r, warps, stages = _config(k, d, keys.dtype, small(keys))
    held = keys.new_empty((b * h, k), dtype=torch.float32)
    # A grid has at most 65,535 programs along its second axis.
    stretch = max(1, min(SCRATCH // (b * h * d * d * 16), 65535 // (b * h)))
    for begin in range(0, chunks - 1, stretch):
        steps = min(stretch, chunks - 1 - begin)
        start, stop = first + begin * chunk, first + (begin + steps) * chunk
        rows, visible = keys[..., start:stop, :], seen(start, stop)
        grams = prefix_grams(rows, steps, base, visible)
        base = grams[..., -1, :, :]
        whitenings = whiten(grams)
        scores = leverage(rows, whitenings, visible)
        best, places = contenders(scores.view(b, h, steps, chunk), fresh)
        launch(
            _running_kernel, (b * h,), (keys, whitenings, best, places, held, index, valid),
            (k, fresh, d, h, chunks, first, chunk, begin, steps, *keys.stride()),
            {"SPLIT": keys.dtype != torch.float32, "PRECISION": precision(keys.dtype), "D": padded_dim(d),
                 "BLOCK_J": block_j, "BLOCK_R": block_r, "BLOCK": max(16, next_power(k + fresh))},
            warps=warps, stages=stages,
        )  # fmt: skip
    return index, valid


_running_op = torch.library.custom_op("levattention::running_top_k", _running, mutates_args=())


@_running_op.register_fake
def _(keys, k, first, chunk, mask):
    b, h, n, _ = keys.shape
    shape = (b, h, -(-(n - first) // chunk), k)
    return keys.new_empty(shape, dtype=torch.int64), keys.new_empty(shape, dtype=torch.bool)


def running_top_k(keys, k, *, chunk, first=0, mask=None):
    """For every chunk of the keys from `first` on, the set of those before it: S ← top-k(S ∪ chunk), from S = ∅.

    The keys before `first` are read as one chunk. Equal scores go to the smaller position.

    Args:
        keys: (B, H, n, d), bf16, fp16 or fp32, any strides.
        k: slots of a set, 1 ≤ k ≤ 1024.
        chunk: keys read between a set and the next.
        first: where the first chunk begins, 0 ≤ first < n.
        mask: (B, H, n) bool or what broadcasts to it; rows where it is False are in no set (and not read).

    Returns:
        (index, valid): (B, H, chunks, k) int64 and bool, each set in the order of positions, empty slots anywhere,
        with index 0. Without gradient.

    Raises:
        ValueError: k, chunk or first is out of range.
    """
    n = keys.shape[-2]
    if not 1 <= k <= MAX_SET:
        raise ValueError(f"k must be between 1 and {MAX_SET}, got {k}")
    if chunk < 1 or not 0 <= first < n:
        raise ValueError(f"chunk, first: expected chunk >= 1 and 0 <= first < n = {n}, got {chunk} and {first}")
    return (_running if eager(keys) else _running_op)(keys.detach(), k, first, chunk, mask)
