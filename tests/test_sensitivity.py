"""Certified sensitivities of |x|^p against HiGHS and CLARABEL, and the smallest universal set they give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import levattention as la
from levattention.scorers import Leverage, Lewis, Lift, PowerBound, Sensitivity, lp
from oracles import attention, lp_sensitivity
from strategies import conditioned, deficient, heavy_tailed, keys, spikes


def holed(n, d):
    matrix = heavy_tailed(n, d, seed=3)
    matrix[::6] = 0
    matrix[1::5] = matrix[1].clone()
    return matrix


SMALL = {
    "gauss": torch.randn(30, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64),
    "heavy": heavy_tailed(30, 4),
    "spikes": spikes(30, 3),
    "ill": conditioned(30, 3, 1e5),
    "deficient": deficient(30, 4, 2),
    "holed": holed(30, 3),
    "large": heavy_tailed(30, 3) * 1e6,
    "square": heavy_tailed(4, 4),
    "bf16": heavy_tailed(30, 3).clamp(-50, 50).bfloat16(),
}


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, 4, 6])
@pytest.mark.parametrize("name", SMALL)
def test_every_row_is_bracketed_and_the_gap_reached(name, p):
    matrix = SMALL[name]
    lower, upper = la.sensitivities(matrix, la.Power(p), gap=1e-4)
    assert (upper - lower <= 1e-4 * upper).all()
    assert ((lower >= 0) & (upper <= 1)).all()
    exact = torch.tensor([lp_sensitivity(matrix, i, p) for i in range(len(matrix))])
    # The solvers' own tolerance is about 1e-6.
    assert (lower <= exact * (1 + 1e-5) + 1e-12).all()
    assert (upper >= exact * (1 - 1e-5) - 1e-12).all()


@pytest.mark.parametrize("p", [1, 1.1, 1.5, 3, 6, 20])
@pytest.mark.parametrize("make", [heavy_tailed, spikes])
def test_small_gaps_are_reached_on_more_keys(make, p):
    matrix = make(200, 8)
    lower, upper = la.sensitivities(matrix, la.Power(p), gap=1e-6)
    assert (upper - lower <= 1e-6 * upper).all()
    assert (upper <= PowerBound(p)(matrix)).all()
    assert upper.sum() <= la.Power(p).total_sensitivity(8, 200) * (1 + 1e-6)


def test_p_2_is_exact():
    lower, upper = la.sensitivities(SMALL["ill"], la.Power(2))
    assert torch.equal(lower, upper)
    assert torch.equal(upper, la.leverage_scores(SMALL["ill"]))


def test_batches():
    batch = torch.stack([SMALL["gauss"], SMALL["ill"], torch.zeros(30, 3), SMALL["holed"]]).reshape(2, 2, 30, 3)
    found = la.sensitivities(batch, la.Power(3))
    for element, lower, upper in zip(
        batch.reshape(4, 30, 3), found.lower.reshape(4, 30), found.upper.reshape(4, 30), strict=True
    ):
        alone = la.sensitivities(element, la.Power(3))
        assert (lower <= alone.upper).all()
        assert (upper >= alone.lower).all()
    assert (found.upper[1, 0] == 0).all()


def test_sparse_keys():
    dense = SMALL["holed"]
    found = la.sensitivities(dense.to_sparse_csr(), la.Power(1))
    torch.testing.assert_close(found.upper, la.sensitivities(dense, la.Power(1)).upper, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [1, 1.5, 4, 6])
@pytest.mark.parametrize("eps", [0.05, 0.3])
def test_the_set_is_the_smallest(p, eps):
    for matrix in (heavy_tailed(300, 6), torch.randn(300, 6, dtype=torch.float64)):
        smallest = la.universal_set(matrix, eps=eps, scorer=Sensitivity(la.Power(p)))
        lower, upper = la.sensitivities(matrix, la.Power(p), gap=1e-6)
        mask = smallest.mask(300)
        assert (lower[~mask] < eps).all()
        assert (upper[mask] >= eps * (1 - 1e-9)).all()
        default = la.universal_set(matrix, eps=eps, loss=la.Power(p)).mask(300)
        assert (default | ~mask).all()


def test_only_open_rows_are_worked_on(monkeypatch):
    worked = []
    newton = lp.newton
    monkeypatch.setattr(lp, "newton", lambda dual, rows, *rest: worked.append(len(rows)) or newton(dual, rows, *rest))
    matrix = heavy_tailed(2000, 8)
    la.universal_set(matrix, eps=0.1, scorer=Sensitivity(la.Power(4)))
    settled_by_the_default = int((PowerBound(4)(matrix) < 0.1).sum())
    assert settled_by_the_default > 1900
    assert 0 < sum(worked) <= 2000 - settled_by_the_default


@pytest.mark.parametrize("p", [1, 3])
def test_top_k_certifies(p):
    matrix = heavy_tailed(100, 4)
    u = la.universal_set(matrix, k=10, scorer=Sensitivity(la.Power(p)))
    upper = la.sensitivities(matrix, la.Power(p)).upper
    assert u.eps.item() == pytest.approx(upper.sort(descending=True).values[10].item())


def test_the_certificates_do_not_lean_on_the_solver(monkeypatch):
    """With every linear solve spoiled the bounds get loose, never wrong."""
    matrix = heavy_tailed(60, 4)
    exact = {p: la.sensitivities(matrix, la.Power(p), gap=1e-6) for p in (1, 1.5, 4)}
    solve = torch.linalg.solve_ex
    noise = torch.Generator().manual_seed(0)

    def spoiled(gram, right):
        answer, info = solve(gram, right)
        return answer * (1 + 0.3 * torch.randn(answer.shape, generator=noise, dtype=answer.dtype)), info

    monkeypatch.setattr(torch.linalg, "solve_ex", spoiled)
    for p, (lower, upper) in exact.items():
        scores = Sensitivity(la.Power(p)).decide(matrix, 0.1)
        assert (scores >= lower * (1 - 1e-9)).all()
        assert (scores.sum() >= upper.sum() * (1 - 1e-6)).all()


@given(matrix=keys(max_n=25, max_d=4), p=st.sampled_from([1, 1.5, 3, 4]), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_any_keys(matrix, p, seed):
    lower, upper = la.sensitivities(matrix, la.Power(p))
    queries = torch.randn(20, matrix.shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    share = attention(matrix, queries / matrix.abs().max().clamp(min=1e-9), la.Power(p))
    assert (share <= upper * (1 + 1e-6) + 1e-12).all()
    assert (lower <= upper).all()
    assert upper[~matrix.any(-1)].eq(0).all()


def test_failures_are_told(monkeypatch):
    monkeypatch.setattr(lp, "NEWTON_STEPS", 1)
    with pytest.raises(la.ConvergenceError, match="keys kept a relative gap"):
        la.sensitivities(heavy_tailed(50, 4), la.Power(6), gap=1e-8)


@pytest.mark.parametrize("gap", [0.0, 1.0, -1.0, float("nan")])
def test_bad_gaps(gap):
    with pytest.raises(ValueError, match="gap: expected"):
        la.sensitivities(torch.eye(2), la.Power(1), gap=gap)


def test_losses_without_a_solver_are_named():
    class Cube:
        def __call__(self, z):
            return z.abs() ** 3

        def total_sensitivity(self, d, n):
            return float(n)

    with pytest.raises(ValueError, match="loss: no solver for"):
        la.sensitivities(torch.eye(2), Cube())
    with pytest.raises(ValueError, match="loss: expected Power, Huber, Tukey or Softmax"):
        la.universal_set(torch.eye(2), eps=0.1, loss=Cube())


def test_defaults_for_every_power():
    matrix = heavy_tailed(500, 5)
    for p, scorer in {1: Lewis(1), 3: Lewis(3), 2: Leverage(), 4: PowerBound(4)}.items():
        by_default = la.universal_set(matrix, eps=0.05, loss=la.Power(p))
        assert torch.equal(by_default.index, la.universal_set(matrix, eps=0.05, scorer=scorer).index)
    assert int((Lift(4)(matrix) < Lewis(4)(matrix)).sum()) > 0
