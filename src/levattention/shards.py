"""Keys in many files: surveyed first, then read piece by piece, each piece a stream of its own that merges.

Pieces lie on a fixed grid, so that the same sums are formed in the same order by any number of workers, and after any
interruption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from levattention.gram import Advance
from levattention.losses import Loss, Power
from levattention.sources import open_keys, shape_of
from levattention.stream import KeyStream

# Elements of a piece, what an interruption can lose and what a worker holds on to; and of a block within it.
PIECE = 1 << 26
BLOCK = 1 << 21


@dataclass(frozen=True)
class Shard:
    """A file of keys (*batch, rows, d) whose first row stands at position `start`."""

    path: str
    tensor: str | None
    rows: int
    start: int
    batch: tuple[int, ...]
    d: int


@dataclass(frozen=True)
class Piece:
    """Rows first … first + count of a shard."""

    shard: Shard
    first: int
    count: int

    @property
    def start(self) -> int:
        """Position of its first row among all shards."""
        return self.shard.start + self.first


def expand(patterns: Iterable[str | Path]) -> list[str]:
    """The files that the names and patterns mean: names as given, matches of a pattern in order of name.

    Raises:
        ValueError: a pattern that matches nothing.
    """
    found: list[str] = []
    for pattern in map(str, patterns):
        if not any(sign in pattern for sign in "*?[") or Path(pattern).is_file():
            found.append(pattern)
            continue
        anchor = Path(pattern).anchor
        matches = sorted(str(path) for path in Path(anchor).glob(pattern.removeprefix(anchor)) if path.is_file())
        if not matches:
            raise ValueError(f"{pattern}: no file matches")
        found += matches
    return found


def survey(paths: Iterable[str], tensor: str | None = None) -> list[Shard]:
    """What each file holds; no keys are read yet.

    Raises:
        ValueError: a file that is missing, truncated or corrupt, or whose keys are shaped unlike those of the first.
    """
    shards: list[Shard] = []
    start = 0
    for path in paths:
        shape = shape_of(path, tensor)
        *batch, rows, d = shape
        shard = Shard(path, tensor, rows, start, tuple(batch), d)
        if shards and (shard.batch, d) != (shards[0].batch, shards[0].d):
            expected = (*shards[0].batch, "n", shards[0].d)
            raise ValueError(
                f"{path}: expected keys of shape {expected} as in {shards[0].path}, got {shape} "
                f"(its rows would start at position {start})"
            )
        shards.append(shard)
        start += rows
    return shards


def pieces(shards: Iterable[Shard]) -> Iterator[Piece]:
    """All rows of all shards, in order."""
    for shard in shards:
        step = max(1, PIECE // (shard.d * math.prod(shard.batch)))
        for first in range(0, shard.rows, step):
            yield Piece(shard, first, min(step, shard.rows - first))


def blocks_of(piece: Piece) -> Iterator[Tensor]:
    """The rows of a piece, block after block.

    Raises:
        ValueError: a bad row, named by its file and its place in it.
    """
    shard = piece.shard
    keys = open_keys(shard.path, shard.tensor)
    if keys.shape != (*shard.batch, shard.rows, shard.d):
        raise ValueError(
            f"{shard.path}: expected shape {(*shard.batch, shard.rows, shard.d)} as before, got {tuple(keys.shape)}"
        )
    yield from checked(keys[..., piece.first : piece.first + piece.count, :], shard.path, piece.first)


def checked(keys: Tensor, name: str, first: int) -> Iterator[Tensor]:
    """Blocks of keys whose first row is row `first` of `name`, each known to be finite."""
    step = max(1, BLOCK // (keys.numel() // keys.shape[-2]))
    for at, block in enumerate(keys.split(step, dim=-2)):
        if not block.sum(dtype=torch.promote_types(block.dtype, torch.float32)).isfinite():
            bad = ~block.isfinite().all(-1).reshape(-1, block.shape[-2]).all(0)
            if bad.any():
                row = int(bad.int().argmax())
                values = block[..., row, :].flatten()
                raise ValueError(
                    f"{name}: row {first + at * step + row} holds {values[~values.isfinite()][0].item()}; "
                    "every entry must be finite"
                )
        yield block


def stream_of(
    blocks: Iterable[Tensor],
    start: int,
    *,
    d: int,
    eps: float,
    loss: Loss = Power(2),  # noqa: B008 (frozen)
    batch: tuple[int, ...] = (),
    advance: Advance | None = None,
) -> KeyStream:
    """The stream of blocks whose first row stands at position `start`, worked off."""
    stream = KeyStream(d, eps=eps, loss=loss, start=start, batch=batch)
    for block in blocks:
        stream.update(block)
        if advance is not None:
            advance(block.shape[-2])
    stream.settle()
    return stream
