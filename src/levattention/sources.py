"""Keys on disk -> a tensor that reads them as it is used; results -> disk, whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from levattention.checks import require_keys


def open_keys(path: str | Path, tensor: str | None = None) -> Tensor:
    """The keys of a .npy or .safetensors file, memory-mapped: pages are read when they are used.

    Args:
        path: the file.
        tensor: which tensor of a .safetensors file; may be left out where there is only one.

    Raises:
        ValueError: a file that is missing, of another kind, truncated, or does not hold keys (*batch, n, d).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".npy":
        if tensor is not None:
            raise ValueError(f"{path}: a .npy file holds one array; --tensor is for .safetensors files")
        keys = _open_npy(path)
    elif path.suffix == ".safetensors":
        keys = _open_safetensors(path, tensor)
    else:
        raise ValueError(f"{path}: expected a .npy or .safetensors file")
    return require_keys(keys, str(path))


def _open_npy(path: Path) -> Tensor:
    try:
        # Copy-on-write rather than read-only: torch warns of read-only memory, and nothing here writes.
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path}: not a readable .npy array ({error})") from None
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise ValueError(f"{path}: expected float16, float32 or float64, got {array.dtype}")
    return torch.from_numpy(array)


def _open_safetensors(path: Path, tensor: str | None) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if tensor is None and len(names) == 1:
                tensor = names[0]
            if tensor not in names:
                asked = "give --tensor NAME" if tensor is None else f"there is no tensor {tensor!r}"
                raise ValueError(f"{path}: {asked}; it holds {', '.join(sorted(names)) or 'nothing'}")
            return file.get_tensor(tensor)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable .safetensors file ({error})") from None


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and vanishes otherwise.

    The old file survives a crash, a full disk or an error: it is replaced whole or not at all.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    # Beside the target, so that the last step is a rename; with the permissions that the user's umask gives.
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        # Some writers put a file of their own in its place, which nobody else may read.
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
