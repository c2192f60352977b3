"""The set of every prefix of a sequence, S ← top-k(S ∪ chunk) by the leverage of the prefix, without a launch a chunk.

Only the choice itself has to go chunk by chunk. The Grams of all prefixes, their factors, and the scores of each
chunk's keys against its own prefix do not depend on the sets, so they come first, all chunks at once; of each chunk
only its k best keys go on, for no other can enter. What is left for the recurrence, one program a head, is to score
the k held keys against the new prefix and to take the k best of 2k.
"""

import torch
import triton
import triton.language as tl

from . import MAX_HEADS, MAX_SET
from .common import cdiv, eager, launch, next_power, padded_dim, precision, small
from .factor import whiten
from .gram_matrix import gram, prefix_grams
from .scores import leverage, split_whitening, squares
from .selection import contenders, sortable, top_k, winners_near

# Bytes that the Grams, their partial sums and factors may take at once; a longer sequence goes in stretches.
SCRATCH = 1 << 28


@triton.jit
def _whitening(p_ptr, j0, d, there, D: tl.constexpr, BLOCK_J: tl.constexpr):
    """A block of P's columns, if P is `there`."""
    col = tl.arange(0, D)
    j = j0 + tl.arange(0, BLOCK_J)
    inside = (col < d)[:, None] & (j < d)[None, :] & there
    return tl.load(p_ptr + col[:, None] * d + j[None, :], mask=inside, other=0.0)


@triton.jit
def _slots(index_ptr, valid_ptr, start, k, BLOCK_R: tl.constexpr):
    """(index, valid) of a tile of held keys."""
    slot = start + tl.arange(0, BLOCK_R)
    return tl.load(index_ptr + slot, mask=slot < k, other=0), tl.load(valid_ptr + slot, mask=slot < k, other=0)


@triton.jit
def _running_kernel(
    k_ptr, p_ptr, key_ptr, position_ptr, index_ptr, valid_ptr,
    k, fresh, d, heads, chunks, first, chunk, begin, steps,
    skb, skh, skn, skd,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """From the set at `begin`, the next `steps` sets of a head. A set lies in the order of positions.

    So the candidates do too, and equal scores go to the smaller position. The program hands over to itself through
    memory that it alone touches; the barrier orders its threads.

    A step is one chain of waits, so whatever does not depend on the set is under way before: P of the next step while
    this one chooses, and P's conversion while the set itself comes back.
    """
    head = tl.program_id(0).to(tl.int64)
    k_ptr += head // heads * skb + head % heads * skh
    p_ptr += head * steps * d * d
    key_ptr += head * steps * fresh
    position_ptr += head * steps * fresh
    index_ptr += (head * chunks + begin) * k
    valid_ptr += (head * chunks + begin) * k
    # Candidates: K places for held keys, then K for fresh ones. Understating how far they lie side by side has each
    # thread take single ones, as the scattered stores below want them: else six vectors change threads at every step.
    rank = tl.max_contiguous(tl.arange(0, 2 * K), 1)
    held = rank < k
    new = (rank >= K) & (rank < K + fresh)
    tile = tl.arange(0, K // BLOCK_R)
    col = tl.arange(0, D)[None, :]
    guess = tl.full([], 0, tl.int32)
    # Only a whole P is read ahead, into registers that the scores leave free.
    AHEAD: tl.constexpr = D == BLOCK_J
    if AHEAD:
        p = _whitening(p_ptr, 0, d, True, D, BLOCK_J)
    index, valid = _slots(index_ptr, valid_ptr, 0, k, BLOCK_R)
    for step in range(0, steps):
        other = tl.load(key_ptr + rank - K, mask=new, other=-2)
        position = tl.load(position_ptr + rank - K, mask=new, other=0) + (first + (begin + step) * chunk)
        position = tl.where(held, tl.load(index_ptr + rank, mask=held, other=0), position)
        usable = tl.load(valid_ptr + rank, mask=held, other=0) != 0
        score = tl.zeros([K // BLOCK_R, BLOCK_R], tl.float32)
        # One block of P's columns at a time, as where all keys are scored. If there are several, the barrier, a count
        # of tiles not known before and slots read anew keep the compiler from holding all of it in registers:
        # on sm_80 it then spills 14 KB a thread.
        tiles = K // BLOCK_R if AHEAD else tl.cdiv(k, BLOCK_R)
        for j0 in tl.static_range(0, D, BLOCK_J):
            if not AHEAD:
                tl.debug_barrier()
                p = _whitening(p_ptr, j0, d, True, D, BLOCK_J)
            high, low, unscale = split_whitening(p, k_ptr.dtype.element_ty) if SPLIT else (p, p, p)
            for at in range(0, tiles):
                # −1 for an empty slot: one vector, not two, goes from the threads that load it to all that need it.
                row = tl.where(valid != 0, index, -1).to(tl.int32)[:, None]
                x = tl.load(k_ptr + row.to(tl.int64) * skn + col * skd, mask=(row >= 0) & (col < d), other=0.0)
                if K > BLOCK_R or not AHEAD:
                    index, valid = _slots(index_ptr, valid_ptr, (at + 1) % tiles * BLOCK_R, k, BLOCK_R)
                part = squares(x, p, high, low, unscale, SPLIT, PRECISION)
                score += tl.where(tile[:, None] == at, part[None, :], 0.0)
        p_ptr += d * d
        if AHEAD:
            p = _whitening(p_ptr, 0, d, step + 1 < steps, D, BLOCK_J)
        score = tl.reshape(tl.broadcast_to(tl.reshape(tl.minimum(score, 1.0), [1, K]), [2, K]), [2 * K])
        key = tl.where(held, sortable(tl.where(usable, score, -1.0), held), other)
        chosen, slot, guess = winners_near(key, k, guess)
        index_ptr += k
        valid_ptr += k
        tl.store(index_ptr + slot, tl.where(key >= 0, position, 0), mask=chosen)
        tl.store(valid_ptr + slot, (key >= 0).to(tl.int8), mask=chosen)
        tl.debug_barrier()
        # Here, not where the next step begins: there the compiler asks for them only once it has converted P.
        index, valid = _slots(index_ptr, valid_ptr, 0, k, BLOCK_R)
        key_ptr += fresh
        position_ptr += fresh


def _config(k, d, dtype, tight=False):
    """(columns of P in a block, held keys in a tile, warps, stages)."""
    padded, rows = padded_dim(d), max(16, next_power(k))
    if dtype == torch.float32:
        return min(padded, 64 if padded <= 128 else 32), min(32 if tight and padded > 128 else 64, rows), 4, 1
    if padded > 128:
        return 64, min(64 if tight else 128, rows), 8, 1
    return padded, min(128 if tight else 256, rows), 8, 1


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
    # A chunk's Gram in fp64, its parts and its factor in fp32; eigh for d > 128 works on copies in fp64.
    each = 12 * d * d + 4 * padded_dim(d) ** 2 + (32 * d * d if d > 128 else 0)
    stretch = max(1, min(SCRATCH // (b * h * each), MAX_HEADS // (b * h)))
    for begin in range(0, chunks - 1, stretch):
        steps = min(stretch, chunks - 1 - begin)
        start, stop = first + begin * chunk, first + (begin + steps) * chunk
        rows, visible = keys[..., start:stop, :], seen(start, stop)
        grams = prefix_grams(rows, steps, base, visible)
        base = grams[..., -1, :, :].clone()
        whitenings = whiten(grams)
        del grams
        scores = leverage(rows, whitenings, visible)
        best, places = contenders(scores.view(b, h, steps, chunk), fresh)
        launch(
            _running_kernel, (b * h,), (keys, whitenings, best, places, index, valid),
            (k, fresh, d, h, chunks, first, chunk, begin, steps, *keys.stride()),
            {"SPLIT": keys.dtype != torch.float32, "PRECISION": precision(keys.dtype), "D": padded_dim(d),
                 "BLOCK_J": block_j, "BLOCK_R": block_r, "K": max(16, next_power(k))},
            warps=warps, stages=stages,
        )  # fmt: skip
        # The next stretch takes its room.
        del whitenings, scores, best, places
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
