"""State on disk: tensors in a safetensors file with a header that says what it is, replaced whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from levattention.sources import replacing

VERSION = "1"


def save_state(path: str | Path, kind: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write the tensors and the configuration; an older file of that name survives any failure.

    Raises:
        OSError: the disk is full, or will not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    header = {"format": f"levattention.{kind}", "version": VERSION, "config": json.dumps(config)}
    with replacing(path) as temporary:
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=header)
        except SafetensorError as error:
            raise OSError(f"{path}: could not be written ({error})") from None


def load_state(
    path: str | Path, kind: str, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the configuration of a file that `save_state` wrote.

    Raises:
        ValueError: a file that is missing, truncated, not ours, of another kind or of another version.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            if header.get("format") != f"levattention.{kind}":
                found = header.get("format", "another program's file")
                raise ValueError(f"{path}: expected a levattention {kind}, got {found}")
            if header.get("version") != VERSION:
                raise ValueError(f"{path}: expected version {VERSION} of the format, got {header.get('version')}")
            # Copied to where allocations start: how a matrix is aligned decides the last bits of its products.
            names = file.keys()
            return {name: file.get_tensor(name).clone() for name in names}, json.loads(header["config"])
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a readable levattention {kind} ({error})") from None
