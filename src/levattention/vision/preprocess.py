"""From a uint8 image to what a model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader

from levattention.vision.images import ImageSet

# ITU-R 601, as Pillow's conversion to grey.
LUMINANCE = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Preprocess:
    """A model's own view of images: colour channels, size, and normalised pixels.

    Attributes:
        mean: of each channel, of pixels in [0, 1].
        std: of each channel.
        size: side of the square that the model takes.
        channels: 3, or 1 for grey.
        crop: which share of the shorter side is left after the centre is cut out. An image that has the right size
            already stays as it is.

    Example:
        >>> prepare = Preprocess(mean=(0.5,), std=(0.25,), size=2, channels=1)
        >>> prepare(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).flatten().tolist()
        [2.0, 2.0, 2.0, 2.0]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int
    channels: int = 3
    crop: float = 1.0

    def __post_init__(self) -> None:
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"Preprocess: expected {self.channels} numbers as mean and as std, got {self}")

    def __call__(self, images: Tensor) -> Tensor:
        """Uint8 (B, c, h, w) -> fp32 (B, channels, size, size), normalised."""
        pixels = self.fit(images).float() / 255
        mean, std = (torch.tensor(n, device=pixels.device).view(-1, 1, 1) for n in (self.mean, self.std))
        return (pixels - mean) / std

    def fit(self, images: Tensor) -> Tensor:
        """The same images with the model's channels and size, still uint8."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"images: expected uint8 (B, 1 or 3, h, w), got {str(images.dtype)[6:]} {tuple(images.shape)}"
            )
        images = self.coloured(images)
        h, w = images.shape[-2:]
        if (h, w) == (self.size, self.size):
            return images
        shorter = max(self.size, round(self.size / self.crop))
        sides = [max(shorter, round(side * shorter / min(h, w))) for side in (h, w)]
        if sides != [h, w]:
            small = interpolate(images.float(), size=sides, mode="bicubic", antialias=True, align_corners=False)
            images = small.round().clamp(0, 255).to(torch.uint8)
        top, left = ((side - self.size) // 2 for side in sides)
        return images[..., top : top + self.size, left : left + self.size]

    def coloured(self, images: Tensor) -> Tensor:
        """The same images, uint8 (B, c, h, w), with the model's channels."""
        if images.shape[1] == self.channels:
            return images
        return images.expand(-1, 3, -1, -1) if self.channels == 3 else _grey(images)

    def collate(self, items: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """(uint8 (B, channels, size, size), labels (B,)) of items of an `ImageSet`, whatever their sizes."""
        images = torch.cat([self.fit(image.unsqueeze(0)) for image, _ in items])
        return images, torch.tensor([label for _, label in items])

    def batches(self, images: ImageSet, batch: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(pixels, labels) of the whole set in its order, `batch` images at a time."""
        loader = DataLoader(images, batch, collate_fn=self.collate, num_workers=workers)
        return ((self(found), labels) for found, labels in loader)


def _grey(images: Tensor) -> Tensor:
    weights = torch.tensor(LUMINANCE, device=images.device).view(3, 1, 1)
    return (images * weights).sum(1, keepdim=True).round().to(torch.uint8)
