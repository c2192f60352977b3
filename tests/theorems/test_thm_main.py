"""Theorem thm:main: for any maps φ and ψ into D dimensions, |U| ≤ D/ε and U holds every key of weight ≥ ε."""

import pytest
import torch

import levattention as la
from levattention.features import Identity, TensorPower
from strategies import heavy_tailed


def cosine_features(x):
    """A map that is neither linear nor polynomial."""
    frequencies = torch.linspace(0.2, 1.5, 6 * x.shape[-1], dtype=torch.float64).reshape(x.shape[-1], 6)
    return torch.cos(x.double() @ frequencies + 0.3)


MAPS = {
    "identity": (Identity(), Identity()),
    "square": (TensorPower(2), TensorPower(2)),
    "cosine keys, polynomial queries": (cosine_features, lambda q: TensorPower(2)(q)[..., :6]),
}


@pytest.mark.parametrize("eps", [0.05, 0.2])
@pytest.mark.parametrize("maps", MAPS)
def test_no_query_breaks_the_set(maps, eps):
    """Gradient ascent over the queries themselves, through ψ, rather than over the features."""
    key_map, query_map = MAPS[maps]
    keys = heavy_tailed(300, 4, seed=5).clamp(-20, 20)
    features = key_map(keys)
    u = la.universal_set(keys, eps=eps, key_map=key_map)
    assert int(u.size) <= features.shape[-1] / eps
    outside = ~u.mask(300)
    generator = torch.Generator().manual_seed(0)
    queries = torch.cat([keys[outside][:100], torch.randn(100, 4, generator=generator, dtype=torch.float64)])
    queries = queries.clone().requires_grad_()
    ascent = torch.optim.Adam([queries], lr=0.05, maximize=True)
    best = 0.0
    for _ in range(100):
        values = (query_map(queries) @ features.mT).square()
        share = values / values.sum(-1, keepdim=True).clamp(min=1e-300)
        heaviest = share[:, outside].amax(-1)
        best = max(best, float(heaviest.max()))
        ascent.zero_grad()
        heaviest.log().sum().backward()
        ascent.step()
    assert 0 < best < eps


def test_the_algorithm_is_deterministic():
    keys = heavy_tailed(300, 4)
    first, second = (la.universal_set(keys, eps=0.1, key_map=TensorPower(2)) for _ in range(2))
    assert torch.equal(first.index, second.index)
    assert torch.equal(first.scores, second.scores)
