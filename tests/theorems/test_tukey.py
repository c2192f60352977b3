"""Theorem (docs/robust.md): for Tukey one level gives a universal set with |U| ≤ d/ε, keys of their own included."""

import math

import pytest
import torch

from levattention import Tukey
from levattention.adversary import attack
from levattention.scorers.robust import Robust
from levattention.universal import capacity, reaches, select_above
from robust_cases import in_five_dimensions, in_the_plane
from sweeps import TUKEY_SIZES, best_shares, directions, tukey


def universal(keys, eps):
    scorer, (n, d) = Robust(Tukey()), keys.shape
    return select_above(scorer.decide(keys, eps), eps, capacity(scorer.bound(d, n), eps, n)).mask(n)


@pytest.mark.parametrize("name", in_the_plane())
def test_no_query_of_the_plane_beats_the_set_or_the_scores(name):
    keys = in_the_plane()[name]
    shares = best_shares(keys, directions(keys, 4000), tukey, TUKEY_SIZES)
    assert (shares <= Robust(Tukey())(keys) * (1 + 1e-9)).all()
    for eps in (0.03, 0.1, 0.35, 1.0):
        inside = universal(keys, eps)
        assert not (shares[~inside] >= eps).any()
        assert inside.sum() <= math.floor(2 / eps * 1.0021)
        assert (shares <= Robust(Tukey()).decide(keys, eps) * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", in_five_dimensions())
def test_ascent_and_normals_find_no_missed_key(name, generator):
    keys, eps = in_five_dimensions()[name], 0.1
    inside = universal(keys, eps)
    assert inside.sum() <= math.floor(5 / eps * 1.0021)
    outside = (~inside).nonzero().squeeze(-1)
    # Normals of four keys at a time: the queries at which most other keys drop out.
    picks = torch.stack([torch.randperm(len(keys), generator=generator)[:4] for _ in range(400)])
    normals = torch.linalg.svd(keys[picks])[2][:, -1]
    shares = best_shares(keys, normals, tukey, TUKEY_SIZES)
    assert not (shares[outside] >= eps).any()
    for threshold in (1e-3, 1e-2, 0.1):
        found = attack(keys, outside, loss=Tukey(threshold), starts=normals[:64], generator=generator, steps=60)
        assert found.weight < eps, (threshold, found)


@pytest.mark.parametrize("eps", [0.9, 0.2, 0.06])
def test_keys_that_leave_the_span_are_in_the_set_and_within_the_bound(eps):
    # Three keys of leverage 1 whose weights decay to zero, a group of four, and a crowd.
    generator = torch.Generator().manual_seed(1)
    crowd = torch.randn(500, 3, generator=generator)
    keys = torch.block_diag(torch.eye(3), torch.ones(4, 1), crowd).double()
    scores = Robust(Tukey()).decide(keys, eps)
    assert (scores[:3] == 1).all()
    assert bool(reaches(scores[3:7], eps).all()) == (eps <= 0.25)
    assert not reaches(scores[7:], eps).any()
    assert reaches(scores, eps).sum() <= 7 / eps


@pytest.mark.parametrize("eps", [0.9, 0.06])
def test_keys_that_leave_the_span_are_found_in_any_coordinates(eps, generator):
    # Rotated, the crowd has rounding in the direction that only one key has; it must not pass for support.
    crowd = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    keys = torch.block_diag(torch.eye(2, dtype=torch.float64), crowd)
    keys = keys @ torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q
    assert universal(keys, eps).nonzero().squeeze(-1).tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(6))
def test_keys_of_very_different_lengths_stay_within_the_bound(seed):
    # Lengths spread over ten powers of ten: weights fall to about 1e-20 and matter all the same.
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.rand(200, 1, generator=generator, dtype=torch.float64) ** -4
    keys = torch.randn(200, 6, generator=generator, dtype=torch.float64) * lengths
    for eps in (0.5, 0.25, 0.1):
        assert universal(keys, eps).sum() <= math.floor(6 / eps * 1.0021)


def test_a_key_outside_the_span_but_for_rounding_is_not_missed():
    # The crowd reaches into the third direction by 1e-9 alone: there the spike's weight falls to nothing.
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    keys[:, 2] = 0
    keys[0] = torch.tensor([0.0, 0.0, 5.0])
    keys[1, 2] = 1e-9
    scores = Robust(Tukey()).decide(keys, 0.5)
    assert reaches(scores, 0.5).nonzero().squeeze(-1).tolist() == [0, 1]


def test_orthogonal_groups_fill_the_bound():
    keys = torch.eye(4, dtype=torch.float64).repeat(20, 1)
    assert universal(keys, 0.05).all()  # 80 = d/ε keys, each able to reach exactly ε
    assert not universal(keys, 0.051).any()
