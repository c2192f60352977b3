"""The inference table: how much of a model's accuracy is left when every query sees k keys a head."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from levattention.integrations.huggingface import use_full_attention
from levattention.vision.images import ImageSet
from levattention.vision.layout import RADIUS
from levattention.vision.preprocess import Preprocess
from levattention.vision.selectors import TITLES, selection, title

Row = dict[str, Any]

FULL = "full"
Z95 = 1.959963984540054


def evaluate(
    model: Any,
    images: ImageSet,
    preprocess: Preprocess,
    *,
    selectors: Sequence[str] = tuple(TITLES),
    budgets: Sequence[int] = (32,),
    batch: int = 25,
    radius: int = RADIUS,
    seed: int = 0,
    done: Iterable[Row] = (),
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[Row]:
    """The rows of the table, one after another: full attention first, then every selector at every budget.

    A row holds shares in [0, 1] with their 95 % Wilson intervals: `top1` and `top5` of all images; `first` and `last`,
    top-1 of the first and the last half; `agree`, how often top-1 is that of full attention. `images_per_second` is of
    the forward passes alone. In the end the model has full attention.

    Args:
        model: a transformers vision transformer.
        images: with labels.
        preprocess: the model's own.
        selectors: names from `selectors.TITLES`, or lewis-P.
        budgets: keys a head; from the number of tokens on this is full attention.
        batch: images in a forward pass.
        radius: Manhattan distance of the local tokens, which `local` sees besides its k keys.
        seed: of the selectors that draw.
        done: rows of an earlier run, which are given back as they are instead of computed again.
        advance: told of images as they are seen.

    Raises:
        ValueError: a selector that does not exist, a budget or batch below 1, or classes that are not the model's.
    """
    require(selectors, budgets, batch)
    images = images.require_classes(model.config.num_labels, getattr(model, "classes", None))
    return _rows(model, images, preprocess, selectors, budgets, batch, radius, seed, list(done), advance)


def require(selectors: Sequence[str], budgets: Sequence[int], batch: int) -> None:
    """Nothing, if such a table can be made.

    Raises:
        ValueError: a selector that does not exist, a budget or batch below 1.
    """
    for name in selectors:
        title(name)
    if not budgets or min([*budgets, batch]) < 1:
        raise ValueError(f"budgets, batch: expected integers of at least 1, got {list(budgets)} and {batch}")


def _rows(
    model: Any,
    images: ImageSet,
    preprocess: Preprocess,
    selectors: Sequence[str],
    budgets: Sequence[int],
    batch: int,
    radius: int,
    seed: int,
    done: list[Row],
    advance: Callable[[int], None],
) -> Iterator[Row]:
    known = {(row["method"], row["top_k"]): row for row in done}
    ranked, labels, seconds = rank(use_full_attention(model), images, preprocess, batch, advance)
    full = ranked[:, 0]
    yield measured(FULL, None, ranked, labels, full, seconds)
    try:
        for name in selectors:
            for top_k in budgets:
                if (name, top_k) in known:
                    advance(len(labels))
                    yield known[name, top_k]
                    continue
                selection(name, top_k, radius=radius, seed=seed).apply(model)
                ranked, labels, seconds = rank(model, images, preprocess, batch, advance)
                yield measured(name, top_k, ranked, labels, full, seconds)
    finally:
        use_full_attention(model)


def rank(
    model: Any,
    images: ImageSet,
    preprocess: Preprocess,
    batch: int,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[Tensor, Tensor, float]:
    """The five likeliest classes of every image, (N, 5), its label, (N,), and the seconds the forward passes took."""
    device = next(model.parameters()).device
    best, held, seconds = [], [], 0.0
    model.eval()
    with torch.inference_mode():
        for inputs, labels in preprocess.batches(images, batch):
            inputs = inputs.to(device)
            start = time.perf_counter()
            # On a GPU the copy of the classes waits for the forward pass.
            best.append(model(pixel_values=inputs).logits.topk(min(5, model.config.num_labels)).indices.cpu())
            seconds += time.perf_counter() - start
            held.append(labels)
            advance(len(labels))
    return torch.cat(best), torch.cat(held), seconds


def measured(name: str, top_k: int | None, ranked: Tensor, labels: Tensor, full: Tensor, seconds: float) -> Row:
    """One row of the table."""
    hit = ranked == labels.unsqueeze(-1)
    right, half = hit[:, 0], len(labels) // 2
    parts = {"top1": right, "top5": hit.any(-1), "first": right[:half], "last": right[half:]}
    row: Row = {"method": name, "top_k": top_k, "images": len(labels)}
    for part, flags in parts.items():
        count, of = int(flags.sum()), len(flags)
        row[part] = count / of if of else None
        row[f"{part}_interval"] = list(wilson(count, of)) if of else None
    row["agree"] = float((ranked[:, 0] == full).double().mean())
    row["images_per_second"] = round(len(labels) / seconds, 2)
    return row


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """The Wilson score interval of a proportion, which unlike p ± z√(p(1−p)/n) holds near 0 and 1 too.

    Example:
        >>> wilson(0, 10)[0], round(wilson(0, 10)[1], 4)
        (0.0, 0.2775)
    """
    share, spread = successes / trials, z * z / trials
    centre = share + spread / 2
    reach = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    low, high = ((centre + sign * reach) / (1 + spread) for sign in (-1, 1))
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)
