"""The small ViTs and their test images as the package carries them: from finished runs to src/levattention/assets.

    python experiments/vit/embed.py --data fashion-mnist --softmax runs/softmax --leverage runs/leverage_32

Either model may be left out. Each is tested as it is stored, in fp16, on the whole test set and on the images that are
packed; both figures go into its metadata and are printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from levattention.vision import load_vit, open_images, pack_images, read_checkpoint, save_vit
from levattention.vision.embedded import IMAGES, MODELS
from levattention.vision.evaluate import rank
from levattention.vision.images import ArrayImages, ImageSet
from levattention.vision.preprocess import Preprocess

EACH = 100
LIMITS = {IMAGES: 600_000, **dict.fromkeys(MODELS.values(), 6_000_000)}
KEPT = ("step", "steps", "seconds", "data", "recipe")


def balanced(images: ArrayImages, each: int) -> ArrayImages:
    """The first images of each class, the classes in turn."""
    assert images.classes is not None
    columns = [(images.labels == label).nonzero().flatten()[:each] for label in range(len(images.classes))]
    index = torch.stack(columns, 1).flatten()
    return ArrayImages(images.name, images.pixels[index], images.labels[index], images.classes)


def right(model: object, images: ImageSet, preprocess: Preprocess) -> int:
    """How many images the model classifies as labelled."""
    ranked, labels, _ = rank(model, images, preprocess, 100)
    return int((ranked[:, 0] == labels).sum())


def main() -> None:
    """Packs the images, stores and tests the models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with Fashion-MNIST's idx files")
    parser.add_argument("--softmax", type=Path, help="folder of the run with full attention")
    parser.add_argument("--leverage", type=Path, help="folder of the run with leverage top-32")
    parser.add_argument("--out", type=Path, default=Path("src/levattention/assets"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    whole = open_images(given.data, split="test")
    assert isinstance(whole, ArrayImages)
    shown = balanced(whole, EACH)
    pack_images(shown, given.out / IMAGES)
    for name, run in zip(MODELS, (given.softmax, given.leverage), strict=True):
        if run is None:
            continue
        model, preprocess = load_vit(run)
        found = {"right_of_1000": right(model, shown, preprocess), "right_of_10000": right(model, whole, preprocess)}
        about = read_checkpoint(run)
        facts = {key: about[key] for key in KEPT} | found
        save_vit(
            given.out / MODELS[name],
            model,
            preprocess,
            selection=model.selection,
            classes=whole.classes,
            **facts,
        )
        print(
            json.dumps(
                {"model": name, "selection": about["selection"], **{k: facts[k] for k in facts if k != "recipe"}}
            )
        )
    for file, limit in LIMITS.items():
        if not (given.out / file).is_file():
            continue
        size = (given.out / file).stat().st_size
        print(f"{file}: {size:,} bytes")
        if size > limit:
            parser.error(f"{file}: expected at most {limit:,} bytes, got {size:,}")


if __name__ == "__main__":
    main()
