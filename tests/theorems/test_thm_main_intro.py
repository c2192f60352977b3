"""Theorem thm:main-intro for f = |x|^p: a set of at most Ψ/ε keys holds every key that any query gives weight ≥ ε.

Both the default set (bounds by Lewis weights and the lift) and the smallest one (true sensitivities) are attacked by
gradient ascent over queries. Of the smallest set it is also shown that no key could be left out: each has its query.
"""

import pytest
import torch

import levattention as la
from levattention.adversary import attack
from levattention.scorers import Sensitivity
from strategies import conditioned, deficient, heavy_tailed, spikes

POWERS = (1, 1.5, 3, 4, 6)
CASES = {
    "gauss": lambda: torch.randn(300, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "heavy tails": lambda: heavy_tailed(300, 5),
    "spikes": lambda: spikes(200, 5),
    "kappa 1e5": lambda: conditioned(200, 5, 1e5),
    "rank 3 of 6": lambda: deficient(200, 6, 3),
}


def outside_of(u, n):
    return (~u.mask(n)).nonzero().squeeze(-1)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("case", CASES)
def test_no_query_breaks_the_default_set(case, p):
    keys, loss = CASES[case](), la.Power(p)
    for eps in (0.03, 0.2):
        u = la.universal_set(keys, eps=eps, loss=loss)
        outside = outside_of(u, len(keys))
        if len(outside):
            assert attack(keys, outside, loss=loss, steps=60).weight < eps
        rank = int(torch.linalg.matrix_rank(keys))
        assert int(u.size) <= loss.total_sensitivity(rank, len(keys)) / eps * (1 + 1e-3)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("case", ["gauss", "heavy tails", "spikes"])
def test_the_smallest_set_is_universal_and_no_key_of_it_is_idle(case, p):
    keys, loss, eps = CASES[case](), la.Power(p), 0.08
    u = la.universal_set(keys, eps=eps, loss=loss, scorer=Sensitivity(loss))
    outside = outside_of(u, len(keys))
    strongest = attack(keys, outside, loss=loss, steps=120)
    lower, upper = la.sensitivities(keys, loss)
    assert strongest.weight < eps
    assert strongest.weight <= float(upper[outside].max())
    # The search is strong: it comes near the heaviest weight that a query is known to attain.
    assert strongest.weight >= 0.9 * float(lower[outside].max())
    inside = u.index[u.valid]
    assert (lower[inside] >= eps * (1 - 1e-3)).all()


@pytest.mark.parametrize("p", POWERS)
def test_top_k_certifies_the_largest_score_left_out(p):
    keys, loss = CASES["heavy tails"](), la.Power(p)
    u = la.universal_set(keys, k=20, loss=loss)
    strongest = attack(keys, outside_of(u, 300), loss=loss, steps=60)
    assert strongest.weight <= float(u.eps)
