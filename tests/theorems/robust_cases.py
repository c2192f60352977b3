"""Keys on which the robust theorems are attacked, in two and in five dimensions."""

import torch

from strategies import conditioned, heavy_tailed, spikes


def in_the_plane():
    generator = torch.Generator().manual_seed(5)
    gauss = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    scales = 10 ** torch.linspace(0, -4, 60, dtype=torch.float64).unsqueeze(-1)
    shared = torch.cat([torch.tensor([[1.0, 0.0]]).repeat(9, 1), torch.randn(50, 2, generator=generator) * 0.1])
    own = torch.cat([torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0, 0.0]]).repeat(40, 1)])
    duplicates = gauss[:12].repeat(4, 1)
    zeros = gauss.clone()
    zeros[::3] = 0
    return {
        "gauss": gauss,
        "heavy-tailed": heavy_tailed(60, 2),
        "spikes": spikes(60, 2),
        "falling scales": gauss * scales,
        "very different lengths": gauss * torch.rand(60, 1, generator=generator, dtype=torch.float64) ** -4,
        "a group of nine": shared.double(),
        "a key of its own": own.double(),
        "duplicates": duplicates,
        "zero rows": zeros,
        "conditioned": conditioned(60, 2, 1e5),
    }


def in_five_dimensions():
    generator = torch.Generator().manual_seed(6)
    gauss = torch.randn(150, 5, generator=generator, dtype=torch.float64)
    blocks = torch.block_diag(torch.ones(6, 1), torch.randn(100, 3, generator=generator), torch.ones(1, 1)).double()
    return {"gauss": gauss, "heavy-tailed": heavy_tailed(150, 5), "spikes": spikes(150, 5), "blocks": blocks}
