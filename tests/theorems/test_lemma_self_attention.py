"""Lemma S-attention: a stand-out key gives itself at least ρ of its own attention row, A_ii² ≥ ρ·Σ_j A_ij²."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from levattention.adversary import attack
from levattention.planted import check, generate, near_orthogonal, recover
from oracles import leverage_by_svd
from strategies import conditioned, heavy_tailed, keys, spikes


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def share_of_own_row(matrix):
    """A_ii²/Σ_j A_ij² from the whole of A = KKᵀ, in fp64; 0 for zero keys."""
    A = (matrix.double() @ matrix.double().mT).numpy()
    total = np.square(A).sum(-1)
    return torch.from_numpy(np.divide(np.square(np.diag(A)), total, out=np.zeros(len(A)), where=total > 0))


@settings(max_examples=200, deadline=None)
@given(keys(), st.data())
def test_any_keys_and_any_set(matrix, data):
    """The lemma asks nothing of δ1 and δ2: with what is measured it holds for every K and every S."""
    nonzero = matrix.square().sum(-1).nonzero().squeeze(-1).tolist()
    if not nonzero:
        return
    standout = torch.tensor(data.draw(st.lists(st.sampled_from(nonzero), min_size=1, unique=True)))
    rho = check(matrix, standout).rho
    assert (share_of_own_row(matrix)[standout] >= rho * (1 - 1e-9)).all()


@pytest.mark.parametrize("matrix", [heavy_tailed(400, 12), spikes(300, 10), conditioned(500, 8, 1e6)])
def test_hard_keys(matrix):
    for seed in range(5):
        standout = torch.randperm(len(matrix), generator=seeded(seed))[:20]
        assert (share_of_own_row(matrix)[standout] >= check(matrix, standout).rho * (1 - 1e-9)).all()


@pytest.mark.parametrize("make", [generate, near_orthogonal])
@pytest.mark.parametrize(("n", "d", "k", "size"), [(300, 64, 16, 12), (1500, 64, 16, 16), (800, 400, 100, 40)])
@pytest.mark.parametrize("eps1", [0.0, 1e-5, 1e-3, 0.1])
def test_parameter_sweep(make, n, d, k, size, eps1):
    model = make(n, d, k, size / n, eps1, seeded(n + d), rotate=True)
    share, found = share_of_own_row(model.keys), model.assumptions
    assert (share[model.standout] >= found.rho * (1 - 1e-9)).all()
    # The way into U: the share is one query's weight, the leverage score the largest of any query.
    assert (share <= leverage_by_svd(model.keys, 1e-14) * (1 + 1e-9)).all()


@pytest.mark.parametrize("seed", range(6))
def test_search_for_keys_that_break_it(seed):
    """Gradient descent on the keys themselves, towards a stand-out key with less than ρ."""
    n, d, size = 10, 4, 4
    matrix = torch.randn(n, d, generator=seeded(seed), dtype=torch.float64, requires_grad=True)
    inside = torch.arange(n) < size
    descent = torch.optim.Adam([matrix], lr=0.02)
    lowest = np.inf
    for _ in range(300):
        A = matrix @ matrix.mT
        squares = A.diagonal()
        ratio = A.abs() / torch.minimum(squares[:, None], squares)
        ratio = ratio - torch.diag(ratio.diagonal())
        delta1, delta2 = ratio[:size, :size].max(), ratio[:size][:, ~inside].max()
        inverse_rho = 1 + delta1**2 * size + delta2**2 * n
        margin = (squares.square() / A.square().sum(-1) * inverse_rho)[:size].min()
        lowest = min(lowest, margin.item())
        descent.zero_grad()
        margin.log().backward()
        descent.step()
    assert lowest >= 1 - 1e-9
    # The search must come near, or it would prove nothing: the proof gives away δ1² + δ2²|S| at most.
    assert lowest < 1.6
    measured = check(matrix.detach(), torch.arange(size))
    assert (share_of_own_row(matrix.detach())[:size] >= measured.rho * (1 - 1e-9)).all()


@pytest.mark.parametrize("delta", [0.01, 0.1, 0.25])
def test_tight_for_equiangular_keys(delta):
    """All pairs at cosine δ: the share is 1/(1 + δ²(n − 1)), and ρ misses it by the paper's |S| for |S| − 1 alone."""
    n = 40
    matrix = torch.linalg.cholesky((1 - delta) * torch.eye(n, dtype=torch.float64) + delta)
    found = check(matrix, torch.arange(n))
    assert found.delta1 == pytest.approx(delta)
    assert found.rho == pytest.approx(1 / (1 + delta**2 * n))
    torch.testing.assert_close(
        share_of_own_row(matrix), torch.full((n,), 1 / (1 + delta**2 * (n - 1)), dtype=torch.float64)
    )


def test_no_query_gives_a_key_outside_the_universal_set_as_much():
    model = near_orthogonal(600, 32, 8, 8 / 600, 1e-3, seeded(), noise=0.2, rotate=True)
    found = model.assumptions
    recovery = recover(model.keys, delta1=0.1, rho=found.rho)
    outside = (~recovery.universal.mask(600)).nonzero().squeeze(-1)
    assert torch.isin(model.standout, recovery.candidates).all()
    assert len(outside) > 500
    assert attack(model.keys, outside, steps=40, generator=seeded()).weight < found.rho


def test_the_papers_deltas_for_its_example_lose_stand_out_keys():
    """δ1 = 4/k and δ2 = 4ε1/k give a ρ that the lemma's inequality fails at: the assumptions do not hold there."""
    n, d, k, size, eps1 = 1000, 256, 64, 80, 1e-4
    model = generate(n, d, k, size / n, eps1, seeded())
    claimed = 1 / (1 + (4 / k) ** 2 * size + (4 * eps1 / k) ** 2 * n)
    assert model.assumptions.delta1 > 4 / k
    assert (share_of_own_row(model.keys)[model.standout] < claimed).all()
    lost = recover(model.keys, delta1=4 / k, rho=claimed)
    assert not torch.isin(model.standout, lost.candidates).any()
    right = recover(model.keys, delta1=0.25, rho=model.assumptions.rho)
    assert torch.isin(model.standout, right.candidates).all()
