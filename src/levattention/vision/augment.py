"""What is done to training images: cropped, flipped, mixed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate, one_hot, pad

from levattention.vision.preprocess import Preprocess


@dataclass(frozen=True)
class Augment:
    """Random changes of a training batch.

    Attributes:
        crop: "none"; "random": a square of the model's size anywhere in the image, padded first; "inception": a
            stretch of 5 % to 100 % of the area with sides 3:4 to 4:3, resized.
        pad: zeros added on every side before a random crop.
        flip: mirror half of the images.
        mixup: Beta's parameter; the batch and itself, moved by one, are mixed with a share drawn from Beta(a, a).
        randaug_layers: how many random operations of RandAugment; 0 for none.
        randaug_magnitude: how strong, 0 to 10.
    """

    crop: str = "none"
    pad: int = 0
    flip: bool = True
    mixup: float = 0.0
    randaug_layers: int = 0
    randaug_magnitude: int = 10

    def __post_init__(self) -> None:
        if self.crop not in ("none", "random", "inception"):
            raise ValueError(f"crop: expected none, random or inception, got {self.crop!r}")
        if min(self.pad, self.mixup, self.randaug_layers) < 0 or not 0 <= self.randaug_magnitude <= 10:
            raise ValueError(f"augment: expected nothing negative and a magnitude up to 10, got {self}")

    def on_batch(self, images: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Cropped to `size` and flipped, uint8 (B, c, size, size).

        Args:
            images: uint8 (B, c, h, w).
            size: side of what comes out.
            generator: on the CPU, whatever the images' device.
        """
        if self.crop == "random":
            images = random_crops(pad(images, [self.pad] * 4), size, generator)
        if self.flip:
            mirrored = torch.rand(len(images), generator=generator) < 0.5
            images = torch.where(mirrored.to(images.device).view(-1, 1, 1, 1), images.flip(-1), images)
        return images

    def on_image(self, image: Tensor, preprocess: Preprocess, generator: torch.Generator) -> Tensor:
        """What is done to one image, uint8 (c, h, w), before it joins a batch; flips come later, and commute."""
        if self.crop == "inception":
            image = inception_crop(image, preprocess.size, generator)
        elif self.crop == "none":
            image = preprocess.fit(image.unsqueeze(0))[0]
        if self.randaug_layers:
            from levattention.vision.randaug import rand_augment

            image = rand_augment(image, self.randaug_layers, self.randaug_magnitude, generator)
        return preprocess.coloured(image.unsqueeze(0))[0]

    def mixed(self, pixels: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(pixels, targets): the targets are labels (B,) without mixup, and shares (B, classes) with it."""
        if not self.mixup:
            return pixels, labels
        share = _beta(self.mixup, generator)
        targets = one_hot(labels, classes).to(pixels.dtype)
        return tuple(share * part + (1 - share) * part.roll(1, 0) for part in (pixels, targets))  # type: ignore[return-value]


def random_crops(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A square of each image, (B, c, size, size), anywhere."""
    h, w = images.shape[-2:]
    if min(h, w) < size:
        raise ValueError(f"images: expected sides of at least {size} for a random crop, got {h} × {w}")
    top, left = (torch.randint(side - size + 1, (len(images), 1), generator=generator) for side in (h, w))
    rows, columns = ((start + torch.arange(size)).to(images.device) for start in (top, left))
    each = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    return images.permute(0, 2, 3, 1)[each, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def inception_crop(image: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A random stretch of the image, (c, h, w), of 5 % to 100 % of its area, resized to (c, size, size)."""
    h, w = image.shape[-2:]
    for _ in range(100):
        draw = torch.rand(4, dtype=torch.float64, generator=generator).tolist()
        area, ratio = h * w * (0.05 + 0.95 * draw[0]), math.exp(math.log(4 / 3) * (2 * draw[1] - 1))
        height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < height <= h and 0 < width <= w:
            top, left = int(draw[2] * (h - height + 1)), int(draw[3] * (w - width + 1))
            image = image[..., top : top + height, left : left + width]
            break
    small = interpolate(image.unsqueeze(0).float(), size=(size, size), mode="bilinear", antialias=True)[0]
    return small.round().clamp(0, 255).to(torch.uint8)


def _beta(a: float, generator: torch.Generator) -> float:
    """The larger part of a Beta(a, a) draw, by Jöhnk's way: U^(1/a) and V^(1/a), given that they sum to at most 1."""
    while True:
        u, v = (torch.rand(2, dtype=torch.float64, generator=generator) ** (1 / a)).tolist()
        if 0 < u + v <= 1:
            return max(u, v) / (u + v)
