"""Training batches, step by step: which images, in which order and how augmented depends on seed and step alone.

So a run that is resumed at a step sees what it would have seen, and nothing random has to be saved.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from levattention.vision.augment import Augment
from levattention.vision.images import ArrayImages, ImageSet
from levattention.vision.preprocess import Preprocess

# Streams of randomness that must not meet.
ORDER, BATCH, IMAGE = 1, 2, 3


def seeded(*numbers: int) -> torch.Generator:
    """A generator that depends on all the numbers."""
    mixed = 0
    for number in numbers:
        # FNV-1a over whole numbers: neighbours get unrelated seeds.
        mixed = ((mixed ^ number) * 0x100000001B3 + 0xCBF29CE484222325) % 2**63
    return torch.Generator().manual_seed(mixed)


class Order:
    """The images of each step: one epoch's permutation after the other, cut into batches without regard to epochs."""

    def __init__(self, images: int, batch: int, seed: int) -> None:
        self.images, self.batch, self.seed = images, batch, seed
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.long)

    def __call__(self, step: int) -> Tensor:
        """(batch,) indices."""
        places = torch.arange(step * self.batch, (step + 1) * self.batch)
        epochs, within = places // self.images, places % self.images
        parts = [self._of(int(epoch))[within[epochs == epoch]] for epoch in epochs.unique()]
        return torch.cat(parts)

    def _of(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = torch.randperm(self.images, generator=seeded(self.seed, ORDER, epoch))
        return self._permutation


class Feed:
    """Batches of (pixels, labels, generator) from a step on: uint8 images of the model's size, cropped and flipped.

    The generator is the step's own, for what is still to be drawn.

    Args:
        images: the training set.
        preprocess: the model's own.
        augment: what is done to them.
        batch: images a step, over all processes.
        seed: of order and augmentation.
        device: where batches are wanted.
        share: (rank, processes): which part of every batch is this process's.
        workers: processes that read image files.
    """

    def __init__(
        self,
        images: ImageSet,
        preprocess: Preprocess,
        augment: Augment,
        batch: int,
        seed: int,
        device: torch.device,
        share: tuple[int, int] = (0, 1),
        workers: int = 0,
    ) -> None:
        if batch % share[1]:
            raise ValueError(f"batch: expected a multiple of {share[1]} processes, got {batch}")
        self.order = Order(len(images), batch, seed)
        self.images, self.preprocess, self.augment = images, preprocess, augment
        self.seed, self.device, self.share, self.workers = seed, device, share, workers
        # An epoch is drawn again and again: held where it is used, if it is in memory anyway.
        whole = isinstance(images, ArrayImages) and augment.crop != "inception" and not augment.randaug_layers
        self.pixels = images.pixels.to(device) if whole and isinstance(images, ArrayImages) else None

    def __call__(self, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor, torch.Generator]]:
        """The batches of steps first, …, steps − 1."""
        loader = None
        if self.pixels is None:
            mine = _Parts(self, range(first, steps))
            loader = iter(DataLoader(_Views(self), batch_sampler=mine, num_workers=self.workers))
        for step in range(first, steps):
            generator = seeded(self.seed, BATCH, step, self.share[0])
            if loader is None:
                assert self.pixels is not None
                index = torch.tensor([i for _, i in self.part(step)])
                images, labels = self.pixels[index.to(self.device)], self.images.labels[index]
                ready = self.preprocess.coloured if self.augment.crop == "random" else self.preprocess.fit
                images = ready(images)
            else:
                images, labels = next(loader)
            images = self.augment.on_batch(images.to(self.device), self.preprocess.size, generator)
            yield images, labels.to(self.device), generator

    def part(self, step: int) -> list[tuple[int, int]]:
        """(place in the run, image) of this process's part of a step."""
        index = self.order(step).tolist()
        rank, count = self.share
        return [(step * self.order.batch + place, index[place]) for place in range(rank, len(index), count)]


class _Parts:
    """This process's part of each step, made as it is asked for: a long run has too many to list."""

    def __init__(self, feed: Feed, steps: range) -> None:
        self.feed, self.steps = feed, steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return (self.feed.part(step) for step in self.steps)


class _Views(Dataset):
    """An image as it is drawn at a place in the run: what has to be done to images one at a time."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        place, index = key
        feed = self.feed
        image, label = feed.images[index]
        view = feed.augment.on_image(image, feed.preprocess, seeded(feed.seed, IMAGE, place))
        return view, label
