"""Folders of image files: a folder for each class, or a labels.csv."""

from __future__ import annotations

import csv
from itertools import chain, zip_longest
from pathlib import Path

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
SPLITS = {"train": ("train",), "test": ("val", "test", "validation")}


def listed_files(folder: Path) -> tuple[list[Path], list[int]]:
    """(files, labels) in the order of the folder's labels.csv.

    Raises:
        ValueError: no labels.csv, columns that are missing, a label that is not a class number, a file that is missing.
    """
    listing = folder / "labels.csv"
    if not listing.is_file():
        raise ValueError(f"folder: expected {listing} with the columns file and label")
    with listing.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    if not rows or not {"file", "label"} <= set(rows[0]):
        raise ValueError(f"folder: expected rows with the columns file and label in {listing}")
    for row in rows:
        if not (row["label"] or "").strip().isdecimal():
            raise ValueError(f"{listing}: expected a class number for {row['file']}, got {row['label']!r}")
    files = [folder / row["file"] for row in rows]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{listing}: {len(missing)} of {len(files)} files are missing, first {missing[0]}")
    return files, [int(row["label"]) for row in rows]


def has_classes(folder: Path) -> bool:
    """Whether a folder holds folders of images, or a train/ or val/ that does."""
    return any(_images(below) for below in _folders(_split_folder(folder, "test") or folder)) or bool(
        _split_folder(folder, "train")
    )


def class_files(folder: Path, split: str) -> tuple[list[Path], list[int], list[str]]:
    """(files, labels, classes) of a folder of class folders, or of its train/ or val/; classes in the order of names.

    Files come a class at a time in turn, so that the first few show many classes.

    Raises:
        ValueError: no such split, a class that one split has and the other lacks, a class without images.
    """
    train, test = _split_folder(folder, "train"), _split_folder(folder, "test")
    home = {"train": train, "test": test}[split]
    if home is None and (train or test or split == "train"):
        wanted = " or ".join(f"{folder / name}" for name in SPLITS[split])
        raise ValueError(f"{folder}: expected {split} images in {wanted}, with a folder for each class")
    home = home or folder
    classes = [below.name for below in _folders(train or home)]
    here = {below.name: _images(below) for below in _folders(home)}
    if unknown := sorted(set(here) - set(classes)):
        raise ValueError(f"{home}: {len(unknown)} classes that {train} lacks, first {unknown[0]}")
    if missing := [name for name in classes if not here.get(name)]:
        raise ValueError(f"{home}: {len(missing)} of {len(classes)} classes have no images, first {missing[0]}")
    columns = [[(file, label) for file in here[name]] for label, name in enumerate(classes)]
    turns = [pair for pair in chain.from_iterable(zip_longest(*columns)) if pair is not None]
    return [file for file, _ in turns], [label for _, label in turns], classes


def _folders(folder: Path) -> list[Path]:
    return sorted(below for below in folder.iterdir() if below.is_dir() and not below.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)


def _split_folder(folder: Path, split: str) -> Path | None:
    """The folder of a split; None where the images lie directly in class folders."""
    for name in SPLITS[split]:
        # A class may be called "test": a split holds folders, a class holds images.
        if (folder / name).is_dir() and _folders(folder / name) and not _images(folder / name):
            return folder / name
    return None
