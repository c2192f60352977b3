"""The paper's work on vision transformers, as functions: models, and images to show them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {"labelled_images": "data", "vit_from_timm": "models"}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from levattention.vision.data import labelled_images as labelled_images
    from levattention.vision.models import vit_from_timm as vit_from_timm


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"levattention.vision.{_HOME[name]}"), name)
    raise AttributeError(f"module 'levattention.vision' has no attribute {name!r}")
