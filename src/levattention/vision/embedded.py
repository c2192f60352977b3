"""The two small vision transformers that come with the package, and test images to show them; see assets/README.md."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any

from levattention.vision.data import open_images
from levattention.vision.images import ImageSet
from levattention.vision.models import load_vit
from levattention.vision.preprocess import Preprocess

ASSETS = files("levattention") / "assets"
MODELS = {"softmax": "vit-softmax.safetensors", "leverage top-32": "vit-leverage-32.safetensors"}
IMAGES = "fashion-test.png"


def embedded_models() -> list[tuple[str, Any, Preprocess]]:
    """(name, model, preprocess) of each: one trained with full attention, one with leverage top-32, alike otherwise."""
    found = []
    for name, file in MODELS.items():
        with as_file(ASSETS / file) as path:
            found.append((name, *load_vit(path)))
    return found


def embedded_images(count: int | None = None) -> ImageSet:
    """1,000 test images of Fashion-MNIST, 100 a class, the classes in turn; the first `count` of them, or all."""
    with as_file(ASSETS / IMAGES) as path:
        return open_images(path, count=count)
