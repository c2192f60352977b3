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
    """The keys of a .npy, .safetensors or .parquet file; the first two are read when they are used, page by page.

    Args:
        path: the file.
        tensor: which tensor of a .safetensors file, or column of vectors of a .parquet file; may be left out where
            there is only one. A .parquet file may instead hold one column of numbers for each of the d columns.

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
    elif path.suffix == ".parquet":
        keys = _open_parquet(path, tensor)
    else:
        raise ValueError(f"{path}: expected a .npy, .safetensors or .parquet file")
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


def _open_parquet(path: Path, column: str | None) -> Tensor:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError(f"{path}: reading .parquet files needs pyarrow: pip install 'levattention[dask]'") from None

    try:
        table = pq.read_table(path, columns=None if column is None else [column])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable .parquet file ({error})") from None
    names = ", ".join(table.column_names) or "nothing"
    if table.num_columns == 0:
        raise ValueError(f"{path}: there is no column {column!r}")
    if any(values.null_count for values in table.columns):
        raise ValueError(f"{path}: expected numbers everywhere, got missing values")
    kinds = {field.type for field in table.schema}
    first = table.schema[0].type
    if table.num_columns == 1 and pa.types.is_fixed_size_list(first):
        kind, flat = first.value_type, table.column(0).combine_chunks().flatten()
        array = flat.to_numpy(zero_copy_only=False).reshape(table.num_rows, first.list_size)
    elif len(kinds) == 1 and pa.types.is_floating(first):
        kind, array = first, np.stack([values.to_numpy() for values in table.columns], axis=1)
    else:
        raise ValueError(
            f"{path}: expected one column of fixed-size vectors (give --tensor NAME) or columns of one float type; "
            f"it holds {names}"
        )
    if not pa.types.is_floating(kind):
        raise ValueError(f"{path}: expected float16, float32 or float64, got {kind}")
    return torch.from_numpy(np.array(array, order="C"))


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
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
