"""Scores without a guarantee, to compare with: the row norm and fixed random positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.checks import require_keys

# Constants of the splitmix64 finaliser, as signed 64-bit integers.
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


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
        bits = _splitmix(_splitmix(position + _wrap(_GOLDEN * (self.seed + 1))) + _GOLDEN * (head + 1))
        uniform = _shift(bits, 11).double() * 2.0**-53
        return (uniform if keys.ndim > 2 else uniform[0]).expand(keys.shape[:-1])


def _wrap(value: int) -> int:
    """A Python integer as the signed 64-bit integer with the same low bits."""
    return (value + 2**63) % 2**64 - 2**63


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _splitmix(bits: Tensor) -> Tensor:
    """The splitmix64 finaliser: a bijection of 64-bit integers that looks random."""
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    return bits ^ _shift(bits, 31)
