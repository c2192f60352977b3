"""Where the tokens of a vision transformer lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from levattention.integrations.huggingface import attention_modules
from levattention.local import Grid

RADIUS = 3


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
    config: Any = getattr(model, "config", None)
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
