"""The ways of choosing k keys a head that the inference table compares, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from levattention.integrations.huggingface import attention_modules
from levattention.local import Grid
from levattention.residuals import Cluster, Sample
from levattention.scorers import Lewis, Norm, Random

RADIUS = 3
LEWIS = "lewis-"
TITLES = {
    "leverage": "leverage",
    "norm": "row norm",
    "random": "random positions",
    "lewis-4": "Lewis, p = 4",
    "local": "leverage + local tokens",
    "sample": "leverage ¼, rest sampled",
    "cluster": "clusters",
    "cluster-keys": "clusters, without queries",
}


@dataclass(frozen=True)
class Layout:
    """Where a vision transformer's tokens lie, and how many layers attend.

    Attributes:
        depth: attention layers.
        heads: of each layer.
        h: rows of the grid of patches.
        w: its columns.
        prefix: tokens before the patches: the class token.
    """

    depth: int
    heads: int
    h: int
    w: int
    prefix: int

    @property
    def tokens(self) -> int:
        """How many tokens a layer sees."""
        return self.prefix + self.h * self.w

    def grid(self, radius: int = RADIUS) -> Grid:
        """The patches within a Manhattan distance of each other."""
        return Grid(self.h, self.w, radius, prefix=self.prefix)


def layout(model: Any) -> Layout:
    """The layout of a transformers vision transformer.

    Raises:
        ValueError: a model that does not cut square patches out of images of one size.
    """
    config = model.config
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    positions = [p for name, p in model.named_parameters() if name.endswith("position_embeddings")]
    if size is None or patch is None or len(positions) != 1:
        raise ValueError(f"model: expected a vision transformer with position embeddings, got {type(model).__name__}")
    (height, width), (down, across) = ((x, x) if isinstance(x, int) else tuple(x) for x in (size, patch))
    h, w = height // down, width // across
    return Layout(
        depth=sum(1 for _ in attention_modules(model)),
        heads=config.num_attention_heads,
        h=h,
        w=w,
        prefix=positions[0].shape[-2] - h * w,
    )


def title(name: str) -> str:
    """A selector's name as people read it.

    Raises:
        ValueError: a selector that does not exist.
    """
    if name in TITLES:
        return TITLES[name]
    if name.startswith(LEWIS):
        return f"Lewis, p = {_power(name):g}"
    raise ValueError(f"selector: expected one of {', '.join(TITLES)} (or {LEWIS}P), got {name!r}")


def options(name: str, places: Layout, *, radius: int = RADIUS, seed: int = 0) -> dict[str, Any]:
    """What `use_lev_attention` needs for this selector, but for top_k.

    Positions that are drawn differ from layer to layer: a patch that no layer ever sees is lost for good. The draws of
    `seed` are those of no other seed.

    Raises:
        ValueError: a selector that does not exist.
    """
    title(name)
    seeds = {layer: seed * places.depth + layer for layer in range(places.depth)}
    if name.startswith(LEWIS):
        return {"scorer": Lewis(_power(name))}
    made: dict[str, dict[str, Any]] = {
        "leverage": {},
        "norm": {"scorer": Norm()},
        "random": {"layers": {layer: {"scorer": Random(own)} for layer, own in seeds.items()}},
        "local": {"window": places.grid(radius)},
        "sample": {"layers": {layer: {"residual": Sample(seed=own)} for layer, own in seeds.items()}},
        "cluster": {"residual": Cluster()},
        "cluster-keys": {"residual": Cluster(use_queries=False, tangents=0)},
    }
    return made[name]


def _power(name: str) -> float:
    try:
        power = float(name.removeprefix(LEWIS))
    except ValueError:
        raise ValueError(f"selector: expected a power after {LEWIS!r}, got {name!r}") from None
    Lewis(power)
    return power
