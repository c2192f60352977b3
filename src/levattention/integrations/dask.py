"""The universal set of a dask array, or of files read by dask workers: dask moves the work, and redoes what is lost.

Each task reads one chunk or one piece of a file and gives back what it added up, d² numbers and the rows that can still
matter; results meet in a tree of fixed shape, in order. A worker that dies takes tasks with it, which dask runs again
elsewhere with the same result.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from levattention import shards
from levattention.checks import require_eps
from levattention.distributed import ShardedSet
from levattention.folds import A
from levattention.losses import Loss, Power
from levattention.passes import found_by, judged_by
from levattention.stream import KeyStream
from levattention.universal import UniversalSet

if TYPE_CHECKING:
    from dask.distributed import Client

# How many results meet in one task.
FAN_IN = 8

Read = Callable[[], Iterable[Tensor]]


def universal_set(
    keys: Any,
    *,
    eps: float,
    loss: Loss = Power(2),  # noqa: B008 (frozen)
    tensor: str | None = None,
    client: Client | None = None,
) -> ShardedSet:
    """The universal set of keys that dask holds or reads, with its keys.

    The rows are read once for x² and even p. Other losses read them again for each step of their weights: an array that
    fits into the memory of the workers should be persisted first.

    Args:
        keys: a dask array (n, d), or .npy, .safetensors or .parquet files (n, d): names and patterns, in order.
        eps: threshold in (0, 1].
        loss: f.
        tensor: which tensor of .safetensors files, or column of .parquet files.
        client: where to compute; by default wherever dask computes now.

    Raises:
        ValueError: bad arguments or files, or a bad row, named by its file or chunk and its place in it.
    """
    import dask

    eps = require_eps(eps)
    reads, d = _of_array(keys) if hasattr(keys, "to_delayed") else _of_files(keys, tensor)

    def fold(make: Callable[[], A]) -> A:
        tasks = [dask.delayed(_seen, pure=False)(make, read) for read in reads]
        while len(tasks) > 1:
            groups = [tasks[first : first + FAN_IN] for first in range(0, len(tasks), FAN_IN)]
            tasks = [dask.delayed(_merged, pure=False)(group) for group in groups]
        return dask.compute(tasks[0])[0] if client is None else client.compute(tasks[0]).result()

    if isinstance(loss, Power) and loss.even:
        stream = fold(lambda: KeyStream(d, eps=eps, loss=loss))
        found = stream.finish()
        rows = stream.candidates.at(found.index.unsqueeze(0))[0] * found.valid.unsqueeze(-1)
    else:
        found, hits = found_by(fold, judged_by(fold, loss, eps), eps, keep_rows=True)
        rows = hits.kept(found)
    return ShardedSet(**{f.name: getattr(found, f.name) for f in fields(UniversalSet)}, keys=rows)


def _of_array(keys: Any) -> tuple[list[Any], int]:
    """What reads each chunk of rows, and d."""
    import dask

    if keys.ndim != 2:
        raise ValueError(f"keys: expected a dask array of shape (n, d), got {keys.ndim} dimensions")
    if keys.dtype not in (np.float16, np.float32, np.float64):
        raise ValueError(f"keys: expected float16, float32 or float64, got {keys.dtype}")
    whole = keys.rechunk({1: -1})
    blocks = whole.to_delayed().ravel().tolist()
    return [dask.delayed(_Chunk, pure=False)(block, i) for i, block in enumerate(blocks)], int(keys.shape[1])


def _of_files(keys: Any, tensor: str | None) -> tuple[list[Any], int]:
    """What reads each piece of the files, and d."""
    names = [keys] if isinstance(keys, str | os.PathLike) else list(keys)
    if not names:
        raise ValueError("keys: expected at least one file, got none")
    files = shards.survey(shards.expand([os.fspath(name) for name in names]), tensor)
    if files[0].batch:
        raise ValueError(f"{files[0].path}: expected keys (n, d), got {(*files[0].batch, files[0].rows, files[0].d)}")
    return [_Piece(piece) for piece in shards.pieces(files)], files[0].d


class _Piece:
    """Reads a piece of a file."""

    def __init__(self, piece: shards.Piece) -> None:
        self.piece = piece

    def __call__(self) -> Iterable[Tensor]:
        return shards.blocks_of(self.piece)


class _Chunk:
    """Reads a chunk of an array."""

    def __init__(self, block: np.ndarray, number: int) -> None:
        self.block, self.number = block, number

    def __call__(self) -> Iterable[Tensor]:
        rows = torch.from_numpy(np.array(self.block, order="C"))
        return shards.checked(rows, f"chunk {self.number}", 0) if len(rows) else []


def _seen(make: Callable[[], A], read: Read) -> A:
    """What an accumulator makes of the rows."""
    seen = make()
    for block in read():
        seen.update(block)
    if isinstance(seen, KeyStream):
        seen.settle()
    return seen


def _merged(parts: list[A]) -> A:
    """All parts in order. The first is copied: dask may hand it to another task."""
    merged = copy.deepcopy(parts[0])
    for part in parts[1:]:
        merged.merge(part)
    return merged
