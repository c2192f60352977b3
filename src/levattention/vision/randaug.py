"""RandAugment (Cubuk et al., 2020): a few random operations of one strength, as in the training of the first ViTs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# What is shown where an image was moved away.
GREY = (128, 128, 128)
# At magnitude 10.
DEGREES, SHEAR, PIXELS, CUTOUT, ADDED = 30.0, 0.3, 100.0, 40.0, 110.0


def rand_augment(image: Tensor, layers: int, magnitude: float, generator: torch.Generator) -> Tensor:
    """An image, uint8 (3, h, w), after `layers` operations drawn with replacement.

    Args:
        image: uint8 (3, h, w).
        layers: how many operations.
        magnitude: how strong, 0 to 10.
        generator: of the choice, of signs and of the place that is cut out.
    """
    from PIL import Image

    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
        raise ValueError(f"image: expected uint8 (3, h, w), got {str(image.dtype)[6:]} {tuple(image.shape)}")
    picture: Any = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    names = list(OPERATIONS)
    for _ in range(layers):
        which = int(torch.randint(len(names), (), generator=generator))
        draw = torch.rand(2, dtype=torch.float64, generator=generator).tolist()
        picture = OPERATIONS[names[which]](picture, magnitude / 10, draw)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def _signed(share: float, draw: list[float]) -> float:
    return share if draw[0] < 0.5 else -share


def _affine(picture: Any, *matrix: float) -> Any:
    from PIL import Image

    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, fillcolor=GREY)


def _rotate(picture: Any, share: float, draw: list[float]) -> Any:
    return picture.rotate(_signed(share * DEGREES, draw), fillcolor=GREY)


def _enhance(kind: str) -> Callable[[Any, float, list[float]], Any]:
    def operation(picture: Any, share: float, draw: list[float]) -> Any:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, kind)(picture).enhance(0.1 + 1.8 * share)

    return operation


def _levels(change: Callable[[np.ndarray, float], np.ndarray]) -> Callable[[Any, float, list[float]], Any]:
    def operation(picture: Any, share: float, draw: list[float]) -> Any:
        table = np.clip(change(np.arange(256), share), 0, 255).astype(int).tolist()
        return picture.point(table * 3)

    return operation


def _posterise(levels: np.ndarray, share: float) -> np.ndarray:
    shift = 8 - int(4 * share)
    return levels >> shift << shift


def _ops(name: str) -> Callable[[Any, float, list[float]], Any]:
    def operation(picture: Any, share: float, draw: list[float]) -> Any:
        from PIL import ImageOps

        return getattr(ImageOps, name)(picture)

    return operation


def _cut_out(picture: Any, share: float, draw: list[float]) -> Any:
    (w, h), reach = picture.size, int(CUTOUT * share)
    x, y = math.floor(draw[0] * w), math.floor(draw[1] * h)
    picture.paste(GREY, (max(0, x - reach), max(0, y - reach), min(w, x + reach), min(h, y + reach)))
    return picture


OPERATIONS: dict[str, Callable[[Any, float, list[float]], Any]] = {
    "autocontrast": _ops("autocontrast"),
    "equalize": _ops("equalize"),
    "invert": _levels(lambda levels, share: 255 - levels),
    "rotate": _rotate,
    "posterize": _levels(_posterise),
    "solarize": _levels(lambda levels, share: np.where(levels < int(256 * share), levels, 255 - levels)),
    "color": _enhance("Color"),
    "contrast": _enhance("Contrast"),
    "brightness": _enhance("Brightness"),
    "sharpness": _enhance("Sharpness"),
    "shear_x": lambda picture, share, draw: _affine(picture, 1, _signed(SHEAR * share, draw), 0, 0, 1, 0),
    "shear_y": lambda picture, share, draw: _affine(picture, 1, 0, 0, _signed(SHEAR * share, draw), 1, 0),
    "translate_x": lambda picture, share, draw: _affine(picture, 1, 0, _signed(PIXELS * share, draw), 0, 1, 0),
    "translate_y": lambda picture, share, draw: _affine(picture, 1, 0, 0, 0, 1, _signed(PIXELS * share, draw)),
    "cutout": _cut_out,
    "solarize_add": _levels(lambda levels, share: np.where(levels < 128, levels + int(ADDED * share), levels)),
}
