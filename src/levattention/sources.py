"""Keys on disk -> a tensor that reads them as it is used; results -> disk, whole or not at all."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def shape_of(path: str | Path, tensor: str | None = None) -> tuple[int, ...]:
    """The shape that `open_keys` would give, without reading the keys."""
    path = Path(path)
    if path.suffix != ".parquet" or not path.is_file():
        return tuple(open_keys(path, tensor).shape)
    with _parquet(path) as file:
        return file.metadata.num_rows, _parquet_width(path, file.schema_arrow, tensor)


def _open_parquet(path: Path, column: str | None) -> Tensor:
    with _parquet(path) as file:
        width = _parquet_width(path, file.schema_arrow, column)
        table = file.read(columns=None if column is None else [column])
    if any(values.null_count for values in table.columns):
        raise ValueError(f"{path}: expected numbers everywhere, got missing values")
    if hasattr(table.schema[0].type, "list_size"):
        array = table.column(0).combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    else:
        array = np.stack([values.to_numpy() for values in table.columns], axis=1)
    return torch.from_numpy(np.array(array, order="C"))


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """The open file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError(f"{path}: reading .parquet files needs pyarrow: pip install 'levattention[dask]'") from None

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable .parquet file ({error})") from None


def _parquet_width(path: Path, schema: Any, column: str | None) -> int:
    """d, once it is known that the file holds one column of vectors, or columns of one float type."""
    fields = list(schema) if column is None else [field for field in schema if field.name == column]
    if not fields:
        raise ValueError(f"{path}: there is no column {column!r}; it holds {', '.join(schema.names) or 'nothing'}")
    first = fields[0].type
    width = len(fields)
    if width == 1 and hasattr(first, "list_size"):
        first, width = first.value_type, first.list_size
    elif len({field.type for field in fields}) > 1:
        raise ValueError(
            f"{path}: expected one column of fixed-size vectors (give --tensor NAME) or columns of one float type; "
            f"it holds {', '.join(schema.names)}"
        )
    if str(first) not in ("halffloat", "float", "double"):
        raise ValueError(f"{path}: expected float16, float32 or float64, got {first}")
    return width


def leftovers(path: Path) -> list[Path]:
    """Temporary files that `replacing(path)` left when its process was killed."""
    named = re.compile(re.escape(f".{path.stem}.") + "[0-9a-f]{32}" + re.escape(path.suffix))
    return [other for other in path.parent.glob(".*") if named.fullmatch(other.name)]


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
