"""The paper's training table in small: CIFAR-10 in 28 × 28 crops, a function for each row and number of tokens.

Patch 2 makes the paper's 197 tokens (S/16, L/16), patch 1 its 785 (L/8). Heads have 64 columns, as the paper's, but the
models are narrow: three heads in six layers, and two heads in four. All rows of one number of tokens are trained alike;
those that select keys take the first 15 % of the steps with full attention, as the paper's large models. One row is run
by

    levattention vit train experiments/vit/configs/cifar.py:p2_leverage_32 --data cifar10 --out runs/p2_leverage_32

and all of them, for several seeds, by `python experiments/vit/train_table.py --data cifar10 --out runs`, which also
tests the softmax-trained models under every selection. cifar10/ holds the sheets that `open_images` reads. If the
sheets were compressed with loss, say so beside every figure.
"""

from __future__ import annotations

from levattention.vision import Augment, Recipe, Selection, Shape

P2 = Shape(28, 2, 3, 10, hidden=192, layers=6, heads=3, mlp=768)
P1 = Shape(28, 1, 3, 10, hidden=128, layers=4, heads=2, mlp=512)


def _recipe(shape: Shape, selection: Selection | None) -> Recipe:
    long = shape is P1
    return Recipe(
        shape=shape,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        epochs=4 if long else 8,
        batch=256,
        lr=1e-3,
        weight_decay=0.05,
        warmup=200,
        selection=selection,
        warm_start=0.0 if selection is None else 0.15,
        augment=Augment(crop="random", flip=True),
        crop=28 / 32,
        bf16=True,
        compile="default",
        test_every=500,
        save_every=400,
        log_every=20,
    )


def p2_softmax() -> Recipe:
    """197 tokens, full attention."""
    return _recipe(P2, None)


def p2_leverage_32() -> Recipe:
    """197 tokens, leverage top-32."""
    return _recipe(P2, Selection("leverage", 32))


def p2_leverage_64() -> Recipe:
    """197 tokens, leverage top-64."""
    return _recipe(P2, Selection("leverage", 64))


def p2_leverage_128() -> Recipe:
    """197 tokens, leverage top-128."""
    return _recipe(P2, Selection("leverage", 128))


def p2_norm_32() -> Recipe:
    """197 tokens, top-32 by squared row norms."""
    return _recipe(P2, Selection("norm", 32))


def p2_random_32() -> Recipe:
    """197 tokens, 32 fixed random positions a head."""
    return _recipe(P2, Selection("random", 32))


def p2_cluster_32() -> Recipe:
    """197 tokens, 32 slots, each the tangent of a cluster of keys; an outlying key has one to itself."""
    return _recipe(P2, Selection("leverage", 32, residual="cluster"))


def p2_heavy_cluster_32() -> Recipe:
    """197 tokens, 32 slots: the 8 keys of largest leverage, and 24 clusters of the others."""
    return _recipe(P2, Selection("leverage", 32, residual="heavy-cluster"))


def p2_sample_32() -> Recipe:
    """197 tokens, 32 slots: the 8 keys of largest leverage, and 24 others drawn once a head, weighted."""
    return _recipe(P2, Selection("leverage", 32, residual="sample"))


def p1_softmax() -> Recipe:
    """785 tokens, full attention."""
    return _recipe(P1, None)


def p1_leverage_32() -> Recipe:
    """785 tokens, leverage top-32."""
    return _recipe(P1, Selection("leverage", 32))


def p1_leverage_64() -> Recipe:
    """785 tokens, leverage top-64."""
    return _recipe(P1, Selection("leverage", 64))


def p1_leverage_128() -> Recipe:
    """785 tokens, leverage top-128."""
    return _recipe(P1, Selection("leverage", 128))


def p1_norm_32() -> Recipe:
    """785 tokens, top-32 by squared row norms."""
    return _recipe(P1, Selection("norm", 32))


def p1_random_32() -> Recipe:
    """785 tokens, 32 fixed random positions a head."""
    return _recipe(P1, Selection("random", 32))


def p1_cluster_32() -> Recipe:
    """785 tokens, 32 slots, each the tangent of a cluster of keys; an outlying key has one to itself."""
    return _recipe(P1, Selection("leverage", 32, residual="cluster"))
