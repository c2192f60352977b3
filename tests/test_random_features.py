"""Positive random features: unbiased, close to softmax for short rows, useless for long ones."""

import math

import pytest
import torch

from levattention import leverage_scores
from levattention.random_features import RandomFeatures
from oracles import attention


def median_of_means(samples, groups):
    return samples.reshape(groups, -1).mean(-1).median()


@pytest.mark.parametrize("orthogonal", [False, True])
def test_the_inner_product_is_unbiased(orthogonal, generator):
    # Median of 200 means of m features each: by Chebyshev a mean is within two standard deviations with
    # probability 3/4, so the median is outside with probability at most exp(−200/8) < 2e-11. Orthogonal blocks have
    # no larger variance (Choromanski and others, 2021), and m is a multiple of d, so no block is split.
    d, groups, m = 4, 200, 2000
    phi = RandomFeatures(d, groups * m, generator=generator, orthogonal=orthogonal)
    for length in (0.5, 2.0):
        q, k = torch.nn.functional.normalize(torch.randn(2, 1, d, generator=generator, dtype=torch.float64), dim=-1)
        q, k = q * length, k * length
        samples = (phi(q) * phi(k)).squeeze(0) * (groups * m)
        true = math.exp(float(q @ k.mT) / (2 * d**0.5))
        both = float((q + k).square().sum()) / (2 * d**0.5)
        deviation = true * math.sqrt(math.expm1(both))
        assert abs(float(median_of_means(samples, groups)) - true) <= 2 * deviation / math.sqrt(m)


def test_squares_of_inner_products_approach_softmax_for_short_rows(generator):
    d = 16
    keys = torch.randn(100, d, generator=generator, dtype=torch.float64) * 0.5
    queries = torch.randn(50, d, generator=generator, dtype=torch.float64) * 0.5
    exact = (queries @ keys.mT / d**0.5).softmax(-1)
    errors = []
    for features in (64, 1024, 16384):
        phi = RandomFeatures(d, features, generator=generator, orthogonal=True)
        found = attention(phi(keys), phi(queries), torch.square)
        errors.append(float((found / exact).log().abs().mean()))
    # Sixteen times the features: a quarter of the error.
    assert errors[2] < 0.02
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.5 * errors[1]


def test_without_the_half_the_weights_would_be_those_of_another_temperature(generator):
    d = 16
    keys = torch.randn(100, d, generator=generator, dtype=torch.float64)
    queries = torch.randn(50, d, generator=generator, dtype=torch.float64)
    phi = RandomFeatures(d, 1 << 15, generator=generator, orthogonal=True)
    found = attention(phi(keys), phi(queries), torch.square)
    right = (found / (queries @ keys.mT / d**0.5).softmax(-1)).log().abs().mean()
    wrong = (found / (queries @ keys.mT / d**0.5 * 2).softmax(-1)).log().abs().mean()
    assert right < 0.3 * wrong


def test_orthogonal_rows_are_orthogonal_and_less_variable(generator):
    d = 8
    rows = RandomFeatures(d, 20, generator=generator, orthogonal=True).directions
    for block in rows.split(d):
        gram = block @ block.mT
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-12
    q = torch.ones(1, d, dtype=torch.float64)
    spread = {}
    for orthogonal in (False, True):
        draws = [RandomFeatures(d, 64, generator=generator, orthogonal=orthogonal)(q) for _ in range(400)]
        spread[orthogonal] = torch.stack([(draw @ draw.mT).squeeze() for draw in draws]).var()
    assert spread[True] < spread[False]


def test_as_many_features_as_keys_select_nothing(generator):
    keys = torch.randn(30, 4, generator=generator)
    assert (leverage_scores(RandomFeatures(4, 64, generator=generator)(keys)) > 0.99).all()
    assert (leverage_scores(RandomFeatures(4, 6, generator=generator)(keys)) < 0.99).any()


def test_the_same_seed_gives_the_same_map_and_batches_are_mapped_alike():
    one, two = (RandomFeatures(3, 10, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    rows = torch.randn(2, 5, 7, 3).bfloat16()
    assert torch.equal(one(rows), two(rows))
    assert torch.equal(one(rows)[1, 2], one(rows[1, 2]))


def test_bad_input_is_named(generator):
    with pytest.raises(ValueError, match="expected widths of at least 1, got d = 3 and features = 0"):
        RandomFeatures(3, 0, generator=generator)
    with pytest.raises(ValueError, match="scale: expected a finite number > 0"):
        RandomFeatures(3, 5, generator=generator, scale=0.0)
    phi = RandomFeatures(3, 500, generator=generator)
    with pytest.raises(ValueError, match=r"rows: expected shape \(\*batch, n, 3\), got \(5, 4\)"):
        phi(torch.zeros(5, 4))
    with pytest.raises(ValueError, match="is not finite"):
        phi(torch.full((2, 3), math.nan))
