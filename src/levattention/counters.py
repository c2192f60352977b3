"""Random bits of a seed and a position: no state, so any block, order or device draws the same."""

from __future__ import annotations

import torch
from torch import Tensor

# Constants of the splitmix64 generator, as signed 64-bit integers.
GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def wrap(value: int) -> int:
    """A Python integer as the signed 64-bit integer with the same low bits."""
    return (value + 2**63) % 2**64 - 2**63


def shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def splitmix(bits: Tensor) -> Tensor:
    """The splitmix64 finaliser: a bijection of 64-bit integers that looks random."""
    bits = (bits ^ shift(bits, 30)) * _MIX_1
    bits = (bits ^ shift(bits, 27)) * _MIX_2
    return bits ^ shift(bits, 31)


def uniform(bits: Tensor) -> Tensor:
    """Bits as fp64 numbers in [0, 1)."""
    return shift(bits, 11).double() * 2.0**-53


def hashed(positions: Tensor, seed: int) -> Tensor:
    """64 bits for every position, int64."""
    return splitmix(splitmix(positions + wrap(GOLDEN * (seed + 1))))


def draw_seed(generator: torch.Generator) -> int:
    """A seed of 62 bits from an explicit generator."""
    return int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
