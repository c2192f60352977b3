"""The rows of `cifar.py` at 197 tokens for a machine without a GPU: a narrow model, two epochs, half an hour at most.

Patch 2, four layers of two heads of 32: small enough for three seeds of the main rows on two CPU cores, far from what
the paper trains, and stopped long before it has converged. All rows are trained alike.

    python experiments/vit/train_table.py --recipes experiments/vit/configs/cifar_narrow.py --data cifar10 --out runs \
        --cpu --jobs 2 --selector-count 2000 --rows p2_softmax p2_leverage_32 p2_norm_32 p2_random_32 \
        p2_cluster_32 p2_leverage_64 p2_leverage_128
"""

from __future__ import annotations

from levattention.vision import Augment, Recipe, Selection, Shape

NARROW = Shape(28, 2, 3, 10, hidden=64, layers=4, heads=2, mlp=128)


def _recipe(selection: Selection | None) -> Recipe:
    return Recipe(
        shape=NARROW,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        epochs=2,
        batch=32,
        lr=2e-3,
        weight_decay=0.05,
        warmup=300,
        selection=selection,
        warm_start=0.0 if selection is None else 0.15,
        augment=Augment(crop="random", flip=True),
        crop=28 / 32,
        bf16=True,
        test_every=10**6,
        save_every=250,
        log_every=25,
    )


def p2_softmax() -> Recipe:
    """Full attention."""
    return _recipe(None)


def p2_leverage_32() -> Recipe:
    """Leverage top-32."""
    return _recipe(Selection("leverage", 32))


def p2_leverage_64() -> Recipe:
    """Leverage top-64."""
    return _recipe(Selection("leverage", 64))


def p2_leverage_128() -> Recipe:
    """Leverage top-128."""
    return _recipe(Selection("leverage", 128))


def p2_norm_32() -> Recipe:
    """Top-32 by squared row norms."""
    return _recipe(Selection("norm", 32))


def p2_random_32() -> Recipe:
    """32 fixed random positions a head."""
    return _recipe(Selection("random", 32))


def p2_cluster_32() -> Recipe:
    """32 slots: heavy keys by leverage, clusters of the others."""
    return _recipe(Selection("leverage", 32, residual="cluster"))
