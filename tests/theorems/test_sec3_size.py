"""Section 3, first theorem: Lewis weights give a set of O(d/ε) keys (p ≤ 2) or O(d^(p/2)/ε) (p > 2) with all σ ≥ ε."""

import pytest
import torch

import levattention as la
from levattention.scorers import Lewis
from strategies import deficient, heavy_tailed, spikes

POWERS = (1, 1.5, 3, 4, 6)
CASES = {
    "gauss": torch.randn(400, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "heavy tails": heavy_tailed(400, 6),
    "spikes": spikes(400, 6),
    "rank 3 of 6": deficient(400, 6, 3),
}


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("case", CASES)
def test_weights_bound_sensitivities_as_the_proof_says(case, p):
    """σ ≤ w for p ≤ 2 and σ ≤ rank^(p/2−1)·w beyond; the paper's d^(p/2−1) is the rank's."""
    keys = CASES[case]
    weights = la.lewis_weights(keys, p)
    rank = round(weights.sum().item())
    lower, _ = la.sensitivities(keys, la.Power(p))
    assert (lower <= weights * max(1.0, rank ** (p / 2 - 1)) * (1 + 1e-5)).all()


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("case", CASES)
def test_size_and_content(case, p):
    keys = CASES[case]
    rank = int(torch.linalg.matrix_rank(keys))
    lower, _ = la.sensitivities(keys, la.Power(p), gap=1e-2)
    for eps in (0.01, 0.1, 0.5):
        u = la.universal_set(keys, eps=eps, scorer=Lewis(p))
        assert int(u.size) <= rank ** max(1.0, p / 2) / eps * (1 + 1e-3)
        assert (lower[~u.mask(400)] < eps).all()


@pytest.mark.parametrize("p", [1, 3, 6])
def test_weights_within_a_factor_of_two_are_enough(p):
    """The proof's last step: with weights good to a factor of two, the threshold ε/2 keeps every heavy key."""
    keys, eps = CASES["heavy tails"], 0.1
    generator = torch.Generator().manual_seed(0)
    rough = la.lewis_weights(keys, p) * 2 ** (torch.rand(400, generator=generator, dtype=torch.float64) * 2 - 1)
    kept = rough * max(1.0, 6 ** (p / 2 - 1)) >= eps / 2
    lower, _ = la.sensitivities(keys, la.Power(p))
    assert (lower[~kept] < eps).all()
    assert int(kept.sum()) <= 4 * 6 ** max(1.0, p / 2) / eps
