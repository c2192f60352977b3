"""The places where other people's models call this package. Each module imports its library when first used."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("dask", "huggingface", "timm")

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"levattention.integrations.{name}")
    raise AttributeError(f"module 'levattention.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
