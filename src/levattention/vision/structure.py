"""What the attention matrices of a vision transformer look like: the measurements of the paper's appendix.

Three masses of every query: of its largest weights, of the patches near it, and of the important keys together with
those patches. W_j, `nonlocal_mass`, is what a key receives from queries that are not near it; the important keys have
the largest. All of it for each layer and head, and how alike it is from one image to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from levattention.integrations.huggingface import attention_modules
from levattention.local import positions
from levattention.universal import best_first, universal_set
from levattention.vision.images import ImageSet
from levattention.vision.layout import RADIUS, Layout, layout
from levattention.vision.observe import observing
from levattention.vision.preprocess import Preprocess

KINDS = ("top", "local", "covered")
TOP = 32
# Fine, so that distances between histograms are those between the masses, up to a hundredth.
BINS = 100
COARSE = 20


@dataclass(frozen=True)
class Masses:
    """What is measured of attention matrices A, (*batch, n, n), whose rows are queries.

    Attributes:
        top: sum of the largest weights of each query, (*batch, n).
        local: mass within the neighbourhood, (*batch, n).
        covered: mass of the important keys and the neighbourhood together, (*batch, n).
        nonlocal_mass: W_j = Σ A_ij over the queries i that are not near j, (*batch, n).
        important: the keys with the largest W_j, (*batch, n), boolean.
    """

    top: Tensor
    local: Tensor
    covered: Tensor
    nonlocal_mass: Tensor
    important: Tensor


def masses(attention: Tensor, near: Tensor, top: int = TOP) -> Masses:
    """The measurements of section 5.1 and the appendix.

    Args:
        attention: (*batch, n, n), rows sum to 1.
        near: which keys are near which query, (n, n), boolean.
        top: how many weights are largest, and how many keys important.

    Raises:
        ValueError: not square, a neighbourhood of another size, or a `top` outside 1 … n.
    """
    n = attention.shape[-1]
    if attention.shape[-2] != n or near.shape != (n, n):
        raise ValueError(
            f"attention: expected (*batch, n, n) with near (n, n), got {tuple(attention.shape)}, {tuple(near.shape)}"
        )
    if not 1 <= top <= n:
        raise ValueError(f"top: expected an integer between 1 and n = {n}, got {top}")
    attention = attention.double()
    received = attention.masked_fill(near, 0.0).sum(-2)
    index = best_first(received, top)
    important = torch.zeros_like(received, dtype=torch.bool).scatter(-1, index, True)
    return Masses(
        top=attention.topk(top, dim=-1).values.sum(-1),
        local=attention.masked_fill(~near, 0.0).sum(-1),
        covered=attention.masked_fill(~(near | important.unsqueeze(-2)), 0.0).sum(-1),
        nonlocal_mass=received,
        important=important,
    )


@dataclass(frozen=True)
class Structure:
    """The measurements of a model over images; L layers, H heads, n tokens.

    Attributes:
        layout: where the tokens lie.
        radius: of the neighbourhood.
        top: how many keys are important.
        histograms: of each kind of mass, how many queries of each image fall into each of BINS equal bins of [0, 1],
            (kinds, L, H, N, BINS).
        means: of each kind, the mean mass, (kinds, L, H).
        nonlocal_mass: mean W_j, (L, H, n).
        overlap: mean number of important keys in U, the `top` keys of the largest leverage, (L, H). Important are here
            those that would receive most if all keys were seen: under LevAttention the others receive nothing.
        chosen: in how many images a token is in U, (L, H, n).
        examples: of the first images: W_j and U, (E, L, H, n) each.
        uniform: of each kind, the mean mass if all weights were equal.
    """

    layout: Layout
    radius: int
    top: int
    histograms: Tensor
    means: Tensor
    nonlocal_mass: Tensor
    overlap: Tensor
    chosen: Tensor
    examples: tuple[Tensor, Tensor]
    uniform: Tensor

    def coarse(self) -> Tensor:
        """Shares of the queries of all images in each of COARSE bins, (kinds, L, H, COARSE)."""
        pooled = self.histograms.sum(-2, dtype=torch.float64).unflatten(-1, (COARSE, BINS // COARSE)).sum(-1)
        return pooled / pooled.sum(-1, keepdim=True)

    def at_least(self, share: float) -> Tensor:
        """Which share of the queries has at least this mass, (kinds, L, H); `share` in whole hundredths."""
        pooled = self.histograms.sum(-2, dtype=torch.float64)
        return pooled[..., round(share * BINS) :].sum(-1) / pooled.sum(-1)

    def distances(self) -> dict[str, tuple[Tensor, Tensor] | None]:
        """Mean Wasserstein-1 and total-variation distances between the histograms of two images, or two heads.

        "images": of the same head, (kinds, L, H) each, None for one image; "heads": of the same image, (kinds,) each,
        None for one head. Distances between images that are small beside those between heads say that the
        distributions belong to the head and not to the input.
        """
        shares = self.histograms.double() / self.layout.tokens
        across = shares.flatten(1, 2).movedim(1, -2)
        heads = apart(across) if across.shape[-2] > 1 else None
        return {
            "images": apart(shares) if shares.shape[-2] > 1 else None,
            "heads": None if heads is None else (heads[0].mean(-1), heads[1].mean(-1)),
        }

    def numbers(self) -> dict[str, Any]:
        """All of it for a JSON file."""
        distances = self.distances()
        half, most = self.at_least(0.5), self.at_least(0.9)
        kinds: dict[str, Any] = {}
        for i, kind in enumerate(KINDS):
            kinds[kind] = {
                "uniform": rounded(self.uniform[i]),
                "mean": rounded(self.means[i]),
                "queries_with_half": rounded(half[i]),
                "queries_with_nine_tenths": rounded(most[i]),
                "histogram": rounded(self.coarse()[i]),
            }
            for name, found in distances.items():
                for distance, values in zip(("wasserstein", "total_variation"), found or (None, None), strict=True):
                    kinds[kind][f"{distance}_between_{name}"] = None if values is None else rounded(values[i])
        place = self.layout
        return {
            "layers": place.depth,
            "heads": place.heads,
            "tokens": place.tokens,
            "grid": [place.h, place.w],
            "prefix": place.prefix,
            "images": self.histograms.shape[-2],
            "radius": self.radius,
            "top": self.top,
            "masses": kinds,
            "nonlocal_mass": rounded(self.nonlocal_mass),
            "important_in_universal": rounded(self.overlap),
            "important_in_universal_by_chance": self.top**2 / place.tokens,
        }


def structure(
    model: Any,
    images: ImageSet,
    preprocess: Preprocess,
    *,
    top: int = TOP,
    radius: int = RADIUS,
    batch: int = 5,
    examples: int = 1,
    advance: Callable[[int], None] = lambda count: None,
) -> Structure:
    """The measurements over all images. One layer's matrices for `batch` images are all that is held at a time.

    Class tokens are local to themselves alone, and are queries and keys like the others.

    Args:
        model: a transformers vision transformer, with full attention or under `use_lev_attention`.
        images: labelled or not, their labels are not looked at.
        preprocess: the model's own.
        top: how many weights are largest, keys important, and keys in U.
        radius: Manhattan distance of the neighbourhood.
        batch: images in a forward pass.
        examples: of how many images W_j and U are kept.
        advance: told of images as they are seen.

    Raises:
        ValueError: a `top` outside 1 … n, a batch below 1, or a model that is no plain vision transformer.
    """
    if batch < 1:
        raise ValueError(f"batch: expected at least one image, got {batch}")
    places = layout(model)
    n, shape = places.tokens, (places.depth, places.heads)
    grid, here = places.grid(radius), positions(slice(0, n), torch.device("cpu"))
    near = grid.near(here, here)
    even = masses(torch.full((n, n), 1 / n), near, top)
    counts = torch.zeros(len(KINDS), *shape, len(images), BINS, dtype=torch.int16)
    sums = torch.zeros(len(KINDS), *shape, dtype=torch.float64)
    received, chosen = torch.zeros(*shape, n, dtype=torch.float64), torch.zeros(*shape, n, dtype=torch.int64)
    overlap = torch.zeros(shape, dtype=torch.float64)
    kept = torch.zeros(min(examples, len(images)), *shape, n, dtype=torch.float64)
    universal = torch.zeros_like(kept, dtype=torch.bool)
    restricted = any(hasattr(module, "_lev_attention") for module in attention_modules(model))
    first = 0

    def see(layer: int, weights: Tensor, queries: Tensor, keys: Tensor) -> None:
        found = masses(weights, near.to(weights.device), top)
        held = universal_set(keys, k=top).mask(n).cpu()
        span = slice(first, first + len(weights))
        for i, kind in enumerate(KINDS):
            values = getattr(found, kind).cpu()
            sums[i, layer] += values.mean(-1).sum(0)
            counts[i, layer, :, span] = histogram(values).transpose(0, 1)
        received[layer] += found.nonlocal_mass.sum(0).cpu()
        chosen[layer] += held.sum(0)
        important = found.important
        if restricted:
            logits = queries @ keys.mT * queries.shape[-1] ** -0.5
            important = masses(logits.softmax(-1), near.to(weights.device), top).important
        overlap[layer] += (held & important.cpu()).sum(-1, dtype=torch.float64).sum(0)
        share = slice(first, min(first + len(weights), len(kept)))
        if share.start < share.stop:
            kept[share, layer] = found.nonlocal_mass[: share.stop - share.start].cpu()
            universal[share, layer] = held[: share.stop - share.start]

    device = next(model.parameters()).device
    model.eval()
    with observing(model, see), torch.inference_mode():
        for inputs, _ in preprocess.batches(images, batch):
            model(pixel_values=inputs.to(device))
            first += len(inputs)
            advance(len(inputs))
    count = len(images)
    return Structure(
        layout=places,
        radius=radius,
        top=top,
        histograms=counts,
        means=sums / count,
        nonlocal_mass=received / count,
        overlap=overlap / count,
        chosen=chosen,
        examples=(kept, universal),
        uniform=torch.stack([getattr(even, kind).mean() for kind in KINDS]),
    )


def histogram(values: Tensor) -> Tensor:
    """How many of the values in [0, 1] fall into each of BINS equal bins, (*batch, n) -> (*batch, BINS)."""
    # A row of a softmax may sum to a little more than 1.
    index = (values * BINS).long().clamp(0, BINS - 1)
    counts = torch.zeros(*values.shape[:-1], BINS, dtype=torch.int64)
    return counts.scatter_add(-1, index, torch.ones_like(index)).short()


def apart(shares: Tensor) -> tuple[Tensor, Tensor]:
    """Mean Wasserstein-1 and total-variation distance over all pairs of histograms, (*batch, N, BINS) -> (*batch,).

    Total variation is between COARSE bins: between fine ones it would be mostly the noise of a few hundred queries.
    """
    wasserstein = spread(shares.cumsum(-1)).sum(-1) / BINS
    coarse = shares.unflatten(-1, (COARSE, BINS // COARSE)).sum(-1)
    return wasserstein, spread(coarse).sum(-1) / 2


def spread(values: Tensor) -> Tensor:
    """Mean |x − y| over all pairs of the N values along the last dimension but one, (*batch, N, c) -> (*batch, c)."""
    count = values.shape[-2]
    # In rising order the i-th value is the larger one in i pairs and the smaller one in N − 1 − i.
    weight = 2.0 * torch.arange(count, dtype=torch.float64) - (count - 1)
    pairs = count * (count - 1) / 2
    return (values.double().sort(-2).values * weight.unsqueeze(-1)).sum(-2) / pairs


def rounded(values: Tensor) -> Any:
    """Nested lists to six places, which is more than the measurements mean."""
    return torch.round(values.double(), decimals=6).tolist()
