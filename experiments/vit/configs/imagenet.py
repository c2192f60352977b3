"""The paper's table of ViTs trained on ImageNet-1k: a function for each row.

Hyperparameters are those of big_vision's ViT-S/16 on ImageNet-1k, which the paper names by its reference and whose
76.5 % at 90 epochs agree with the paper's 76.47 %: Adam at 1e-3 with a decoupled decay of 1e-4 a step (as AdamW counts
it, 1e-4 / 1e-3 = 0.1), batch 1,024, 90 epochs, 10,000 steps of warm-up, then a cosine, gradients clipped at 1,
inception crops, flips, RandAugment(2, 10), mixup 0.2, fixed sine positions, a tanh layer before the classifier. The
paper's classification by a class token is kept (big_vision pools). big_vision holds 1 % of the training images back;
here all are used.

Each is run by

    accelerate launch $(which levattention) vit train experiments/vit/configs/imagenet.py:ROW \
        --data imagenet --out runs/ROW --workers 16 --no-check

(or `levattention vit train …` on one device), where imagenet/ holds train/ and val/ with a folder for each class;
`--resume` goes on after a kill. None has been run here. Times are estimates from operation counts, three forward
passes' worth for each image at 300 TFLOP/s in bf16 on one H200-class GPU; reading and RandAugment on fewer than about
30 CPU cores take longer than S/16 itself.
"""

from __future__ import annotations

from dataclasses import replace

from levattention.vision import Augment, Recipe, Selection, Shape

S16 = Shape(224, 16, 3, 1000, hidden=384, layers=12, heads=6, mlp=1536, pre_logits=True, positions="sincos")
L16 = Shape(224, 16, 3, 1000, hidden=1024, layers=24, heads=16, mlp=4096, pre_logits=True, positions="sincos")
L8 = replace(L16, patch=8)

# The paper trains the large models with full attention for the first 15 % of the steps, and S/16 without.
WARM = 0.15


def _recipe(shape: Shape, selection: Selection | None, warm_start: float, micro_batch: int) -> Recipe:
    return Recipe(
        shape=shape,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        epochs=90,
        batch=1024,
        lr=1e-3,
        weight_decay=0.1,
        warmup=10_000,
        selection=selection,
        warm_start=warm_start,
        augment=Augment(crop="inception", flip=True, mixup=0.2, randaug_layers=2, randaug_magnitude=10),
        crop=224 / 256,
        clip=1.0,
        bf16=True,
        micro_batch=micro_batch,
        save_every=1000,
        log_every=50,
    )


def _s16(selection: Selection | None) -> Recipe:
    return _recipe(S16, selection, 0.0, 0)


def _l16(selection: Selection | None) -> Recipe:
    return _recipe(L16, selection, WARM, 256)


def _l8(selection: Selection | None) -> Recipe:
    return _recipe(L8, selection, WARM, 64)


def s16_softmax() -> Recipe:
    """S/16, full attention. Paper: 76.47 %. About 3 hours.

    levattention vit train experiments/vit/configs/imagenet.py:s16_softmax --data imagenet --out s16_softmax
    """
    return _s16(None)


def s16_leverage_32() -> Recipe:
    """S/16, leverage, top-32. Paper: 68.30 %. About 3 hours.

    levattention vit train experiments/vit/configs/imagenet.py:s16_leverage_32 --data imagenet --out s16_leverage_32
    """
    return _s16(Selection("leverage", 32))


def s16_leverage_64() -> Recipe:
    """S/16, leverage, top-64. Paper: 72.48 %. About 3 hours.

    levattention vit train experiments/vit/configs/imagenet.py:s16_leverage_64 --data imagenet --out s16_leverage_64
    """
    return _s16(Selection("leverage", 64))


def s16_norm_32() -> Recipe:
    """S/16, squared row norms, top-32. Paper: similar to leverage top-32, no figure. About 3 hours.

    levattention vit train experiments/vit/configs/imagenet.py:s16_norm_32 --data imagenet --out s16_norm_32
    """
    return _s16(Selection("norm", 32))


def s16_random_32() -> Recipe:
    """S/16, fixed random positions, top-32. Paper: similar to leverage top-32, no figure. About 3 hours.

    levattention vit train experiments/vit/configs/imagenet.py:s16_random_32 --data imagenet --out s16_random_32
    """
    return _s16(Selection("random", 32))


def l16_softmax() -> Recipe:
    """L/16, full attention. Paper: 78.83 %. About 40 hours.

    levattention vit train experiments/vit/configs/imagenet.py:l16_softmax --data imagenet --out l16_softmax
    """
    return _l16(None)


def l16_leverage_32() -> Recipe:
    """L/16, leverage, top-32. Paper: 75.12 %. About 40 hours.

    levattention vit train experiments/vit/configs/imagenet.py:l16_leverage_32 --data imagenet --out l16_leverage_32
    """
    return _l16(Selection("leverage", 32))


def l16_leverage_64() -> Recipe:
    """L/16, leverage, top-64. Paper: 77.27 %. About 40 hours.

    levattention vit train experiments/vit/configs/imagenet.py:l16_leverage_64 --data imagenet --out l16_leverage_64
    """
    return _l16(Selection("leverage", 64))


def l16_leverage_128() -> Recipe:
    """L/16, leverage, top-128. Paper: 77.17 %. About 40 hours.

    levattention vit train experiments/vit/configs/imagenet.py:l16_leverage_128 --data imagenet --out l16_leverage_128
    """
    return _l16(Selection("leverage", 128))


def l16_norm_32() -> Recipe:
    """L/16, squared row norms, top-32. Paper: similar to leverage top-32, no figure. About 40 hours.

    levattention vit train experiments/vit/configs/imagenet.py:l16_norm_32 --data imagenet --out l16_norm_32
    """
    return _l16(Selection("norm", 32))


def l16_random_32() -> Recipe:
    """L/16, fixed random positions, top-32. Paper: similar to leverage top-32, no figure. About 40 hours.

    levattention vit train experiments/vit/configs/imagenet.py:l16_random_32 --data imagenet --out l16_random_32
    """
    return _l16(Selection("random", 32))


def l8_softmax() -> Recipe:
    """L/8, full attention. Paper: 79.47 %. About 7 days.

    levattention vit train experiments/vit/configs/imagenet.py:l8_softmax --data imagenet --out l8_softmax
    """
    return _l8(None)


def l8_leverage_32() -> Recipe:
    """L/8, leverage, top-32. Paper: 71.96 %. About 7 days.

    levattention vit train experiments/vit/configs/imagenet.py:l8_leverage_32 --data imagenet --out l8_leverage_32
    """
    return _l8(Selection("leverage", 32))


def l8_leverage_64() -> Recipe:
    """L/8, leverage, top-64. Paper: 74.64 %. About 7 days.

    levattention vit train experiments/vit/configs/imagenet.py:l8_leverage_64 --data imagenet --out l8_leverage_64
    """
    return _l8(Selection("leverage", 64))


def l8_leverage_128() -> Recipe:
    """L/8, leverage, top-128. Paper: 76.69 %. About 7 days.

    levattention vit train experiments/vit/configs/imagenet.py:l8_leverage_128 --data imagenet --out l8_leverage_128
    """
    return _l8(Selection("leverage", 128))


def l8_norm_32() -> Recipe:
    """L/8, squared row norms, top-32. Paper: similar to leverage top-32, no figure. About 7 days.

    levattention vit train experiments/vit/configs/imagenet.py:l8_norm_32 --data imagenet --out l8_norm_32
    """
    return _l8(Selection("norm", 32))


def l8_random_32() -> Recipe:
    """L/8, fixed random positions, top-32. Paper: similar to leverage top-32, no figure. About 7 days.

    levattention vit train experiments/vit/configs/imagenet.py:l8_random_32 --data imagenet --out l8_random_32
    """
    return _l8(Selection("random", 32))
