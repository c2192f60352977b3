"""Many images in one file: idx files as MNIST's and Fashion-MNIST's, CIFAR-10 as sheets, and our own sheets."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levattention.sources import replacing
from levattention.vision.images import ArrayImages, ImageSet

IDX = {"train": "train", "test": "t10k"}
FASHION = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
# Fashion-MNIST has MNIST's file names: the first labels tell them apart.
FASHION_STARTS = {"train": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5], "test": [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]}
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHEETS = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
CIFAR_SIDE = 32


def is_idx(folder: Path) -> bool:
    """Whether the folder holds MNIST's files."""
    return any(_idx_file(folder, f"{stem}-images-idx3-ubyte") for stem in IDX.values())


def is_cifar(folder: Path) -> bool:
    """Whether the folder holds CIFAR-10 as sheets."""
    return any(_sheet_file(folder, name) for name in SHEETS["train"] + SHEETS["test"])


def idx_images(folder: Path, split: str, count: int | None = None) -> ArrayImages:
    """The images of idx files, plain or gzipped, uint8 (1, h, w).

    Raises:
        ValueError: a file that is missing, truncated or of another kind.
    """
    arrays = []
    for kind, axes in (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1)):
        name = f"{IDX[split]}-{kind}"
        file = _idx_file(folder, name)
        if file is None:
            raise ValueError(f"{folder}: expected {name} or {name}.gz")
        arrays.append(_read_idx(file, axes))
    pixels, labels = (torch.from_numpy(array) for array in arrays)
    fashion = labels[:10].tolist() == FASHION_STARTS[split]
    name, classes = ("Fashion-MNIST", FASHION) if fashion else (folder.name, None)
    return ArrayImages(f"{name} {split}", pixels.unsqueeze(1)[:count], labels[:count], classes)


def _idx_file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_idx(path: Path, axes: int) -> np.ndarray:
    """The array of an idx file of bytes: a magic number, big-endian sizes, the values in row order."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a readable idx file ({error})") from None
    header = 4 + 4 * axes
    shape = tuple(np.frombuffer(data[4:header], ">u4").tolist()) if len(data) >= header else ()
    if data[:4] != bytes((0, 0, 8, axes)) or len(data) != header + int(np.prod(shape)):
        raise ValueError(f"{path}: expected an idx file of bytes with {axes} axes, whole, got {len(data)} bytes")
    # Copied: torch warns of memory that cannot be written.
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy()


def cifar_images(folder: Path, split: str, count: int | None = None) -> ArrayImages:
    """CIFAR-10 from sheets of 32 × 32 tiles in row order and {train,test}_labels.npy, uint8 (3, 32, 32).

    Raises:
        ValueError: a sheet or the labels missing, or of another size.
    """
    labels_file = folder / f"{split}_labels.npy"
    if not labels_file.is_file():
        raise ValueError(f"{folder}: expected {labels_file.name} beside the sheets")
    labels = torch.from_numpy(np.load(labels_file, allow_pickle=False))
    sheets: list[Tensor] = []
    for name in SHEETS[split]:
        file = _sheet_file(folder, name)
        if file is None:
            raise ValueError(f"{folder}: expected the sheet {name}.webp or {name}.png")
        sheets.append(_tiles(_read_sheet(file, "RGB")[0], (CIFAR_SIDE, CIFAR_SIDE), str(file)))
        if count is not None and sum(map(len, sheets)) >= count:
            break
    pixels = torch.cat(sheets)
    if count is None and len(pixels) != len(labels):
        raise ValueError(f"{folder}: expected as many labels as tiles, got {len(labels)} for {len(pixels)}")
    return ArrayImages(f"CIFAR-10 {split}", pixels[:count], labels[: len(pixels)][:count], CIFAR)


def _sheet_file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.webp", folder / f"{name}.png") if path.is_file()), None)


def pack_images(images: ImageSet, path: str | Path, columns: int = 40) -> None:
    """Write images of one size to a PNG sheet, without loss; labels, tile size and names go into its text chunks.

    Args:
        images: a set with at most 256 classes.
        path: ends in .png; replaced whole.
        columns: tiles in a row.
    """
    from PIL import Image, PngImagePlugin

    tiles = torch.stack([images[i][0] for i in range(len(images))])
    rows = -(-len(tiles) // columns)
    filled = torch.cat([tiles, tiles.new_zeros(rows * columns - len(tiles), *tiles.shape[1:])])
    sheet = filled.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    texts = PngImagePlugin.PngInfo()
    texts.add_text("name", images.name)
    texts.add_text("tile", f"{tiles.shape[2]}x{tiles.shape[3]}")
    texts.add_text("labels", " ".join(str(label) for label in images.labels.tolist()))
    if images.classes is not None:
        texts.add_text("classes", "\n".join(images.classes))
    with replacing(path) as temporary:
        Image.fromarray(sheet.squeeze(-1).numpy()).save(temporary, format="PNG", optimize=True, pnginfo=texts)


def packed_images(path: Path, count: int | None = None) -> ArrayImages:
    """The images of a sheet written by `pack_images`.

    Raises:
        ValueError: a file that is not one.
    """
    sheet, texts = _read_sheet(path, None)
    if not {"name", "tile", "labels"} <= set(texts):
        raise ValueError(f"{path}: expected a folder of images, or a sheet with its labels as pack_images writes it")
    h, w = (int(side) for side in texts["tile"].split("x"))
    labels = torch.tensor([int(label) for label in texts["labels"].split()])
    tiles = _tiles(sheet, (h, w), str(path))[: len(labels)]
    classes = texts["classes"].split("\n") if "classes" in texts else None
    return ArrayImages(texts["name"], tiles[:count], labels[:count], classes)


def _read_sheet(path: Path, mode: str | None) -> tuple[Tensor, dict[str, Any]]:
    """(uint8 (H, W, c), text chunks) of an image file."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            texts = dict(getattr(image, "text", {}))
            array = np.array(image if mode is None else image.convert(mode))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: not a readable image ({error})") from None
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]), texts


def _tiles(sheet: Tensor, size: tuple[int, int], name: str) -> Tensor:
    """(N, c, h, w), the tiles of a sheet (H, W, c) in row order."""
    (h, w), (height, width) = size, sheet.shape[:2]
    if height % h or width % w:
        raise ValueError(f"{name}: expected whole tiles of {h} × {w}, got a sheet of {height} × {width}")
    return sheet.unflatten(1, (width // w, w)).unflatten(0, (height // h, h)).permute(0, 2, 4, 1, 3).flatten(0, 1)
