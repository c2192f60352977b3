"""Claim (docs/softmax.md): no query of the ball gives a key outside the set weight ε; longer queries may."""

import pytest
import torch

from levattention.scorers.softmax import SoftmaxBall
from levattention.universal import reaches
from strategies import heavy_tailed


def climb(keys, targets, radius, generator, steps=150):
    """The largest weight on a target that Adam finds in the ball, from targets' directions and random ones."""
    d = keys.shape[-1]
    starts = torch.cat([keys[targets], torch.randn(64, d, generator=generator, dtype=torch.float64)])
    queries = (torch.nn.functional.normalize(starts, dim=-1) * radius).requires_grad_()
    aim = torch.cat([targets, targets[torch.randint(len(targets), (64,), generator=generator)]])
    ascent = torch.optim.Adam([queries], lr=0.05 * radius, maximize=True)
    best = 0.0
    for _ in range(steps):
        share = (queries @ keys.mT).log_softmax(-1)
        best = max(best, float(share.detach()[:, targets].max().exp()))
        ascent.zero_grad()
        share.gather(-1, aim.unsqueeze(-1)).sum().backward()
        ascent.step()
        with torch.no_grad():
            queries *= (radius / queries.norm(dim=-1, keepdim=True)).clamp(max=1.0)
    return best


def cases():
    generator = torch.Generator().manual_seed(9)
    return {
        "gauss": torch.randn(200, 8, generator=generator, dtype=torch.float64),
        "off centre": torch.randn(200, 8, generator=generator, dtype=torch.float64) + 3,
        "plane": torch.randn(150, 2, generator=generator, dtype=torch.float64),
        "heavy-tailed": heavy_tailed(200, 4).clamp(-5, 5),
    }


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize(("radius", "eps"), [(1.0, 0.03), (3.0, 0.1), (3.0, 0.5)])
def test_no_query_of_the_ball_reaches_a_key_outside(name, radius, eps, generator):
    keys = cases()[name]
    outside = (~reaches(SoftmaxBall(radius).decide(keys, eps), eps)).nonzero().squeeze(-1)
    if len(outside):
        assert climb(keys, outside, radius, generator) < eps


def test_a_query_outside_the_ball_can_reach_one(generator):
    keys, eps = cases()["gauss"], 0.1
    outside = (~reaches(SoftmaxBall(2.0).decide(keys, eps), eps)).nonzero().squeeze(-1)
    assert climb(keys, outside, 2.0, generator) < eps
    assert climb(keys, outside, 8.0, generator) > eps


def test_no_size_bound_exists():
    # On a circle every key is a vertex of the hull: with long queries all of them reach any ε < 1, though d = 2.
    angles = torch.arange(500, dtype=torch.float64) * (2 * torch.pi / 500)
    keys = torch.stack([angles.cos(), angles.sin()], -1)
    assert reaches(SoftmaxBall(2e5).decide(keys, 0.5), 0.5).all()
