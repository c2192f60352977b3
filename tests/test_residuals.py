"""What stands for the light keys, against explicit sums."""

from __future__ import annotations

import itertools

import pytest
import torch

import dense
import levattention as la
from levattention.residuals import Cluster, Drop, Sample
from test_attention import inputs, padding, same_with_gradients


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("form", ["none", "batch", "heads"])
@pytest.mark.parametrize("heavy", [0.0, 0.25, 0.5])
def test_a_sample_weighs_each_drawn_key_by_one_over_its_probability(window, form, heavy):
    q, k, v = inputs(n=30, m=30)
    given, mask = padding(2, 3, 30, form)
    got = la.attend(q, k, v, top_k=8, residual=Sample(heavy, seed=4), key_mask=given, window=window)
    draw = la.scorers.Random(4)(k.detach())
    near = dense.local(30, 30, window)
    weights = torch.zeros(2, 3, 30, 30, dtype=torch.float64)
    best = int(8 * heavy)
    for i, j in itertools.product(range(2), range(3)):
        kept = dense.top_leverage(k[i, j].detach(), mask[i, j], best)
        light = [x for x in range(30) if mask[i, j, x] and x not in kept]
        drawn = [light[x] for x in dense.best(draw[i, j, light], 8 - best)]
        weights[i, j, :, kept] = 1
        weights[i, j, :, drawn] = len(light) / len(drawn)
    weights = torch.where(near, 1.0, weights) * mask.unsqueeze(-2)
    same_with_gradients(got, dense.attention(q, k, v, weights, 5**-0.5), (q, k, v))


def test_a_sample_is_unbiased():
    """Over 400 seeds the mean estimate of Σ exp is within five standard errors of the sum itself."""
    q, k, v = (x.detach() for x in inputs(b=1, h=1, m=1, n=50))
    exact = (q @ k.mT * 5**-0.5).exp().sum()
    mask = torch.ones(1, 1, 50, dtype=torch.bool)
    chosen = la.universal_set(k, k=12)
    estimates = []
    for seed in range(400):
        slots = Sample(seed=seed)(q, k, v, chosen, mask, 5**-0.5)
        estimates.append(((q @ slots.keys.mT * 5**-0.5).squeeze() + slots.log_weight.squeeze()).exp().sum())
    estimates = torch.stack(estimates)
    assert abs(estimates.mean() - exact) < 5 * estimates.std() / 20


def test_a_sample_is_the_same_every_time_and_differs_between_heads():
    q, k, v = (x.detach() for x in inputs(n=40))
    options = {"top_k": 8, "residual": Sample(seed=1)}
    assert torch.equal(la.attend(q, k, v, **options), la.attend(q, k, v, **options))
    assert not torch.equal(la.attend(q, k, v, **options), la.attend(q, k, v, top_k=8, residual=Sample(seed=2)))


def test_with_room_for_all_light_keys_a_sample_is_full_attention():
    q, k, v = (x.detach() for x in inputs(n=21))
    mask = torch.zeros(2, 21, dtype=torch.bool)
    mask[:, :11] = True
    want = la.attend(q, k, v, top_k=21, key_mask=mask)
    torch.testing.assert_close(la.attend(q, k, v, top_k=12, key_mask=mask, residual=Sample()), want)


@pytest.mark.parametrize("heavy", [-0.1, 1.0, 2.0])
def test_bad_shares(heavy):
    for kind in (Sample, Cluster):
        with pytest.raises(ValueError, match=r"share in \[0, 1\)"):
            kind(heavy)
    with pytest.raises(ValueError, match="iterations"):
        Cluster(iterations=-1)


def test_drop_is_the_default():
    q, k, v = inputs()
    assert torch.equal(la.attend(q, k, v, top_k=5), la.attend(q, k, v, top_k=5, residual=Drop()))
