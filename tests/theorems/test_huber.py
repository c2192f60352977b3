"""Theorem (docs/robust.md): for Huber one scale gives a universal set with |U| ≤ 4d/(3ε), or d/ε for the C⁰ form."""

import math

import pytest
import torch

from levattention import Huber
from levattention.adversary import attack
from levattention.scorers.robust import Robust
from levattention.universal import capacity, select_above
from robust_cases import in_five_dimensions, in_the_plane
from sweeps import HUBER_SIZES, best_shares, directions, huber, huber_kinked

FORMS = [(Huber(), huber, 4 / 3), (Huber(smooth=False), huber_kinked, 1.0)]


def universal(keys, loss, eps):
    scorer, (n, d) = Robust(loss), keys.shape
    return select_above(scorer.decide(keys, eps), eps, capacity(scorer.bound(d, n), eps, n)).mask(n)


@pytest.mark.parametrize("name", in_the_plane())
@pytest.mark.parametrize(("loss", "f", "density"), FORMS)
def test_no_query_of_the_plane_beats_the_set_or_the_scores(name, loss, f, density):
    keys = in_the_plane()[name]
    shares = best_shares(keys, directions(keys), f, HUBER_SIZES)
    assert (shares <= Robust(loss)(keys) * (1 + 1e-9)).all()
    for eps in (0.03, 0.1, 0.35, 1.0):
        inside = universal(keys, loss, eps)
        assert not (shares[~inside] >= eps).any()
        assert inside.sum() <= math.floor(density * 2 / eps + 1e-3)
        assert (shares <= Robust(loss).decide(keys, eps) * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", in_five_dimensions())
@pytest.mark.parametrize(("loss", "density"), [(loss, density) for loss, _, density in FORMS])
def test_ascent_finds_no_missed_key(name, loss, density, generator):
    keys, eps = in_five_dimensions()[name], 0.1
    inside = universal(keys, loss, eps)
    assert inside.sum() <= math.floor(density * 5 / eps + 1e-3)
    outside = (~inside).nonzero().squeeze(-1)
    # The attack starts at queries of one length; a small threshold is a long query.
    for threshold in (1e-3, 1e-2, 0.1, 0.5):
        scaled = Huber(threshold, smooth=loss.smooth)
        found = attack(keys, outside, loss=scaled, generator=generator, steps=60)
        assert found.weight < eps, (threshold, found)


def test_the_sweep_sees_keys_that_are_in_the_set():
    keys = in_the_plane()["heavy-tailed"]
    shares = best_shares(keys, directions(keys), huber, HUBER_SIZES)
    inside = universal(keys, Huber(), 0.1)
    assert 0 < (shares >= 0.1).sum() <= inside.sum() < len(keys)


@pytest.mark.parametrize("loss", [Huber(), Huber(smooth=False)])
def test_orthogonal_groups_fill_the_bound(loss):
    keys = torch.eye(4, dtype=torch.float64).repeat(20, 1)
    assert universal(keys, loss, 0.05).all()  # 80 = d/ε keys, each able to reach exactly ε
    assert not universal(keys, loss, 0.07).any()
