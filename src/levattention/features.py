"""φ and ψ of the generalised attention problem, in which a score is f(⟨ψ(q), φ(k)⟩).

A map takes rows (*batch, n, d) to rows (*batch, n, D) of any width D; any callable that does so will serve.
`universal_set(keys, key_map=φ)` is the universal set of φ(K) (Lemma lem:wlog of the paper), so under x² its size is at
most D/ε.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from levattention.checks import FLOATS
from levattention.random_features import RandomFeatures

__all__ = ["Identity", "KeyMap", "RandomFeatures", "TensorPower", "map_keys"]

KeyMap = Callable[[Tensor], Tensor]
"""Rows (*batch, n, d) -> rows (*batch, n, D)."""

# Columns beyond which the fp64 Gram of the features (2 GiB here) is more than a machine can be expected to spare.
MAX_COLUMNS = 1 << 14
MAX_BYTES = 8 << 30


@dataclass(frozen=True)
class Identity:
    """φ(x) = x."""

    def __call__(self, keys: Tensor) -> Tensor:
        """The keys themselves."""
        return keys

    def width(self, d: int) -> int:
        """D = d."""
        return d


@dataclass(frozen=True)
class TensorPower:
    """The symmetric k-th tensor power: ⟨φ(x), φ(y)⟩ = ⟨x, y⟩^k in D = C(d+k−1, k) columns instead of d^k.

    φ_α(x) = √(k!/∏αᵢ!)·x^α for every multi-index α of weight k. Under x², its leverage scores bound the sensitivities
    of |x|^(2k).

    Attributes:
        k: the power, at least 1.

    Example:
        >>> x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])
        >>> lift = TensorPower(3)
        >>> round((lift(x) @ lift(y).mT).item(), 12), lift.width(2)
        (1.0, 4)
    """

    k: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k: expected an integer >= 1, got {self.k!r}")

    def width(self, d: int) -> int:
        """D = C(d+k−1, k)."""
        return math.comb(d + self.k - 1, self.k)

    def __call__(self, keys: Tensor) -> Tensor:
        """φ of every row in fp64, (*batch, n, D); rows do not depend on each other, so blocks may be lifted alone.

        Raises:
            ValueError: sparse keys, or features that cannot fit; the message has their size.
        """
        d, wide = keys.shape[-1], self.width(keys.shape[-1])
        if keys.layout is not torch.strided:
            raise ValueError(f"keys: TensorPower({self.k}) needs dense keys, got {keys.layout}")
        size = 8 * wide * math.prod(keys.shape[:-1])
        if wide > MAX_COLUMNS or size > MAX_BYTES:
            raise ValueError(
                f"TensorPower({self.k}) of {d} columns has {wide:,}: {gigabytes(size)} for shape {tuple(keys.shape)} "
                f"and {gigabytes(8 * wide * wide)} for a Gram; at most {MAX_COLUMNS:,} columns and "
                f"{gigabytes(MAX_BYTES)} of features are formed"
            )
        choice, scale = (table.to(keys.device) for table in multi_indices(d, self.k))
        values = keys.double()
        lifted = values[..., choice[:, 0]]
        for j in range(1, self.k):
            lifted *= values[..., choice[:, j]]
        return lifted.mul_(scale)


@lru_cache(maxsize=16)
def multi_indices(d: int, k: int) -> tuple[Tensor, Tensor]:
    """All multi-indices of weight k as sorted columns (D, k), and √(k!/∏αᵢ!) for each.

    Not by torch.combinations, which goes through all d^k.
    """
    choice = torch.tensor(list(itertools.combinations_with_replacement(range(d), k)))
    run = torch.ones(len(choice), dtype=torch.float64)
    repeats = run.clone()
    for j in range(1, k):
        run = torch.where(choice[:, j] == choice[:, j - 1], run + 1, 1.0)
        repeats *= run
    return choice, (math.factorial(k) / repeats).sqrt()


def gigabytes(size: float) -> str:
    """A number of bytes, for a message."""
    return f"{size / 1e9:.3g} GB"


def map_keys(key_map: KeyMap | None, keys: Tensor, name: str = "key_map") -> Tensor:
    """φ(K), once it is known to have a row for every key.

    Raises:
        ValueError: the map returned no tensor, not floats, or a shape other than (*batch, n, D).
    """
    if key_map is None:
        return keys
    mapped = key_map(keys)
    expected = (*keys.shape[:-1], "D")
    if not isinstance(mapped, Tensor):
        raise ValueError(f"{name}: expected a tensor of shape {expected}, got {type(mapped).__name__}")
    if mapped.ndim != keys.ndim or mapped.shape[:-1] != keys.shape[:-1] or mapped.shape[-1] < 1:
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(mapped.shape)}")
    if mapped.dtype not in FLOATS:
        raise ValueError(f"{name}: expected floating features, got {mapped.dtype}")
    return mapped
