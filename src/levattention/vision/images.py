"""Labelled images: what every source of them gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

# Names shown in a message before it says how many more there are.
SHOWN = 5


class ImageSet(Dataset):
    """Images with labels: `images[i]` is (uint8 (c, h, w), label).

    Attributes:
        name: what it is, for titles and reports.
        classes: their names in the order of the labels; None where the source has none.
        labels: (N,) int64.
        skipped: names of the images that could not be read and were left out.
    """

    def __init__(
        self, name: str, labels: Tensor, classes: Sequence[str] | None = None, skipped: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.labels = labels.long()
        self.classes = None if classes is None else tuple(classes)
        self.skipped = tuple(skipped)
        if not len(self.labels):
            raise ValueError(f"{name}: expected at least one image, got none")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # IndexError rather than a wrapped-around index: it ends a loop over the set.
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name}: expected an index below {len(self)}, got {index}")
        return self.image(index), int(self.labels[index])

    def image(self, index: int) -> Tensor:
        """Uint8 (c, h, w)."""
        raise NotImplementedError

    def require_classes(self, count: int, names: Sequence[str] | None = None) -> ImageSet:
        """The set itself, if a classifier of so many classes, of these names if it has any, can name all its images.

        Where the classes are the same in another order, as folders are in alphabetical order, the set with the
        classifier's labels.

        Raises:
            ValueError: a label beyond, or a list of classes of another length or with other names.
        """
        highest = int(self.labels.max())
        if highest >= count:
            raise ValueError(f"{self.name}: expected labels 0 to {count - 1} for this model, got {highest}")
        if self.classes is not None and len(self.classes) != count:
            raise ValueError(f"{self.name}: expected {count} classes as in the model, got {len(self.classes)}")
        if names is None or self.classes is None or self.classes == tuple(names):
            return self
        if sorted(self.classes) != sorted(names):
            other = sorted(set(self.classes) - set(names))[:SHOWN]
            raise ValueError(f"{self.name}: expected the model's classes, got others, such as {', '.join(other)}")
        place = torch.tensor([list(names).index(name) for name in self.classes])
        ordered = copy.copy(self)
        ordered.labels, ordered.classes = place[self.labels], tuple(names)
        return ordered


class ArrayImages(ImageSet):
    """Images of one size, held in memory as uint8 (N, c, h, w)."""

    def __init__(self, name: str, pixels: Tensor, labels: Tensor, classes: Sequence[str] | None = None) -> None:
        if len(pixels) != len(labels):
            raise ValueError(f"{name}: expected as many labels as images, got {len(labels)} for {len(pixels)}")
        super().__init__(name, labels, classes)
        self.pixels = pixels

    def image(self, index: int) -> Tensor:
        """Uint8 (c, h, w)."""
        return self.pixels[index]


class FileImages(ImageSet):
    """Image files, read in colour as they are asked for.

    Args:
        name: see `ImageSet`.
        paths: the files.
        labels: of each.
        classes: see `ImageSet`.
        skip_bad: leave out what cannot be read, instead of failing.
        check: read every image once now. Without it a bad image fails when it is asked for.
        advance: called with the number of images checked since the last call.

    Raises:
        ValueError: images that cannot be read, counted and the first few named.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        labels: Sequence[int],
        classes: Sequence[str] | None = None,
        *,
        skip_bad: bool = False,
        check: bool = True,
        advance: Callable[[int], Any] | None = None,
    ) -> None:
        good = _readable(paths, advance) if check else [True] * len(paths)
        bad = [str(path) for path, fine in zip(paths, good, strict=True) if not fine]
        if bad and not skip_bad:
            more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
            raise ValueError(
                f"{name}: {len(bad)} of {len(paths)} images cannot be read: {', '.join(bad[:SHOWN])}{more}; "
                "--skip-bad (skip_bad=True) leaves them out"
            )
        self.paths = [path for path, fine in zip(paths, good, strict=True) if fine]
        kept = [label for label, fine in zip(labels, good, strict=True) if fine]
        super().__init__(name, torch.tensor(kept, dtype=torch.long), classes, bad)

    def image(self, index: int) -> Tensor:
        """Uint8 (3, h, w)."""
        try:
            return read_image(self.paths[index])
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"{self.paths[index]}: not a readable image ({error})") from None


def read_image(path: Path) -> Tensor:
    """An image file in colour, uint8 (3, h, w)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode.startswith("I;16"):
                # Pillow would cut 16 bits off at 255.
                grey = torch.from_numpy((np.asarray(image) // 256).astype(np.uint8))
                return grey.expand(3, -1, -1).clone()
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from None


def _readable(paths: Sequence[Path], advance: Callable[[int], Any] | None) -> list[bool]:
    """For each file whether it decodes to the end: a truncated one has a sound header."""

    def fine(path: Path) -> bool:
        try:
            read_image(path)
        except (OSError, SyntaxError, ValueError):
            return False
        return True

    found = []
    # Threads, because the decoders let others run.
    with ThreadPoolExecutor() as pool:
        for one in pool.map(fine, paths):
            found.append(one)
            if advance is not None:
                advance(1)
    return found
