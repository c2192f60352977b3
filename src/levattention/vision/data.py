"""Images from wherever they are: `open_images(source)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from levattention.vision.folders import class_files, has_classes, listed_files
from levattention.vision.images import FileImages, ImageSet, read_image
from levattention.vision.packed import cifar_images, idx_images, is_cifar, is_idx, packed_images

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ImageSet", "labelled_images", "open_images"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

SPLITS = {"train": "train", "test": "test", "val": "test", "validation": "test"}


def open_images(
    source: str | Path,
    *,
    split: str = "test",
    count: int | None = None,
    skip_bad: bool = False,
    check: bool = True,
    advance: Callable[[int], Any] | None = None,
) -> ImageSet:
    """The images of a source, told by what it holds.

    A folder with labels.csv (columns file and label); a folder of class folders, as they are or below train/ and val/
    or test/; CIFAR-10 as sheets; the idx files of Fashion-MNIST or MNIST, plain or gzipped; or a sheet written by
    `pack_images`.

    Args:
        source: the folder or file.
        split: "train", or "test" (also called "val"). A source without splits has test images only.
        count: the first so many; of class folders, a class at a time in turn. None for all.
        skip_bad: leave out image files that cannot be read; they are in the result's `skipped`.
        check: read every image file once now, so that bad ones are found before any work is done.
        advance: called with the number of image files checked since the last call.

    Raises:
        ValueError: a source of no known kind, without this split, with classes missing, or with images that cannot be
            read, counted and named.

    Example:
        >>> open_images("no/such/folder")
        Traceback (most recent call last):
            ...
        ValueError: no/such/folder: expected a folder of images or a sheet of them, and there is nothing
    """
    path = Path(source)
    if split not in SPLITS:
        raise ValueError(f"split: expected train or test, got {split!r}")
    if count is not None and count < 1:
        raise ValueError(f"count: expected a positive number of images, got {count}")
    split = SPLITS[split]
    if not path.exists():
        raise ValueError(f"{path}: expected a folder of images or a sheet of them, and there is nothing")
    if path.is_dir() and is_idx(path):
        return idx_images(path, split, count)
    if path.is_dir() and is_cifar(path):
        return cifar_images(path, split, count)
    classes: list[str] | None = None
    listed = (path / "labels.csv").is_file()
    if path.is_dir() and not listed and has_classes(path):
        files, labels, classes = class_files(path, split)
    elif split == "train":
        raise ValueError(f"{path}: has no train images: expected train/ with class folders, CIFAR sheets or idx files")
    elif path.is_file():
        return packed_images(path, count)
    elif listed:
        files, labels = listed_files(path)
    else:
        raise ValueError(f"{path}: expected class folders, a labels.csv, CIFAR-10 sheets or idx files")
    return FileImages(
        f"{path.name} {split}" if classes else path.name,
        files[:count],
        labels[:count],
        classes,
        skip_bad=skip_bad,
        check=check,
        advance=advance,
    )


def labelled_images(folder: str | Path, count: int | None = None) -> tuple[Tensor, Tensor]:
    """(pixels (N, 3, h, w), labels (N,)) of the first `count` images that `labels.csv` lists, in its order.

    Pixels are scaled to [0, 1] and normalised with ImageNet's mean and standard deviation.

    Args:
        folder: holds labels.csv with the columns `file` and `label`, and the images, all of one size.
        count: how many; None for all.

    Raises:
        ValueError: no labels.csv, or columns that are missing.
    """
    files, labels = listed_files(Path(folder))
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    pixels = torch.stack([read_image(file) for file in files[:count]]).float() / 255
    return (pixels - mean) / std, torch.tensor(labels[:count])
