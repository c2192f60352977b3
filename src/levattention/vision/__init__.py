"""The paper's work on vision transformers, as functions: models, and images to show them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Augment": "augment",
    "ImageSet": "images",
    "Preprocess": "preprocess",
    "Recipe": "recipe",
    "Selection": "selection",
    "Shape": "shape",
    "labelled_images": "data",
    "load_recipe": "recipe",
    "load_vit": "models",
    "open_images": "data",
    "pack_images": "packed",
    "read_checkpoint": "models",
    "save_vit": "models",
    "vit_from_timm": "models",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from levattention.vision.augment import Augment as Augment
    from levattention.vision.data import labelled_images as labelled_images
    from levattention.vision.data import open_images as open_images
    from levattention.vision.images import ImageSet as ImageSet
    from levattention.vision.models import load_vit as load_vit
    from levattention.vision.models import read_checkpoint as read_checkpoint
    from levattention.vision.models import save_vit as save_vit
    from levattention.vision.models import vit_from_timm as vit_from_timm
    from levattention.vision.packed import pack_images as pack_images
    from levattention.vision.preprocess import Preprocess as Preprocess
    from levattention.vision.recipe import Recipe as Recipe
    from levattention.vision.recipe import load_recipe as load_recipe
    from levattention.vision.selection import Selection as Selection
    from levattention.vision.shape import Shape as Shape


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"levattention.vision.{_HOME[name]}"), name)
    raise AttributeError(f"module 'levattention.vision' has no attribute {name!r}")
