"""Scores without a guarantee, to compare with: the row norm and fixed random positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.checks import require_keys
from levattention.counters import GOLDEN, splitmix, uniform, wrap


@dataclass(frozen=True)
class Norm:
    """‖kᵢ‖². Certifies nothing: a long key may never be heavy, and a short one may always be.

    Example:
        >>> Norm()(torch.tensor([[3.0, 4.0], [1.0, 0.0]])).tolist()
        [25.0, 1.0]
    """

    certified: ClassVar[bool] = False

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """Squared row norms."""
        require_keys(keys)
        return torch.linalg.vecdot(keys.double(), keys.double())


@dataclass(frozen=True)
class Random:
    """Scores that depend on the seed, the head and the position alone.

    Every batch element gets the same positions; they differ along the last leading dimension (the head). A hash
    rather than a generator, so that the positions do not depend on device, dtype or the number of heads.

    Example:
        >>> scores = Random(0)(torch.zeros(5, 2, 7, 3))
        >>> bool((scores[0] == scores[4]).all()), bool((scores[0, 0] == scores[0, 1]).any())
        (True, False)
    """

    seed: int = 0

    certified: ClassVar[bool] = False

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """Uniform numbers in [0, 1), (*batch, n)."""
        require_keys(keys)
        n, heads = keys.shape[-2], keys.shape[-3] if keys.ndim > 2 else 1
        head = torch.arange(heads, device=keys.device).unsqueeze(-1)
        position = torch.arange(n, device=keys.device)
        scores = uniform(splitmix(splitmix(position + wrap(GOLDEN * (self.seed + 1))) + GOLDEN * (head + 1)))
        return (scores if keys.ndim > 2 else scores[0]).expand(keys.shape[:-1])
