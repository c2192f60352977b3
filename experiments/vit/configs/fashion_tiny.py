"""The two small ViTs that come with the package: six layers, six heads, 197 tokens, Fashion-MNIST.

The geometry is the paper's (28 × 28 images in patches of 2 make the same 14 × 14 grid as 224 × 224 in patches of 16),
the width such that one CPU core trains it in an hour. `experiments/vit/embed.py` puts them into the package. Figures
are of the models as stored there, in fp16, seed 0, one run each, on an AMD EPYC that was shared with other work.
"""

from __future__ import annotations

from levattention.vision import Augment, Recipe, Selection, Shape

TINY = Shape(image=28, patch=2, channels=1, classes=10, hidden=96, layers=6, heads=6, mlp=192)


def softmax() -> Recipe:
    """Full attention. 68 minutes on half a CPU core, 85.52 % of the 10,000 test images.

    levattention vit train experiments/vit/configs/fashion_tiny.py:softmax --data fashion-mnist --out runs/softmax
    """
    return Recipe(
        shape=TINY,
        mean=(0.2860,),
        std=(0.3530,),
        epochs=1.75,
        batch=32,
        lr=1e-3,
        weight_decay=0.05,
        warmup=200,
        augment=Augment(flip=False),
        seed=0,
        test_every=10**6,
        save_every=100,
    )


def leverage_32() -> Recipe:
    """Leverage top-32 after 15 % of the steps with full attention. 66 minutes, 83.13 %.

    levattention vit train experiments/vit/configs/fashion_tiny.py:leverage_32 --data fashion-mnist --out runs/leverage
    """
    from dataclasses import replace

    return replace(softmax(), selection=Selection("leverage", 32), warm_start=0.15)
