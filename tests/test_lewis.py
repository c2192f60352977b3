"""Lewis weights against their fixed point and a convex program; the bounds that need no convergence; the lift."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import levattention as la
from levattention.scorers import Lewis, Lift, PowerBound, lewis
from oracles import leverage_by_svd, lewis_ellipsoid, lewis_powers, lp_sensitivity
from strategies import conditioned, deficient, heavy_tailed, keys, spikes

POWERS = (1, 1.1, 1.5, 3, 4, 6, 10, 20)


def gauss(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scaled_rows(n, d):
    return gauss(n, d) * torch.logspace(0, -4, n, dtype=torch.float64).unsqueeze(-1)


def holed(n, d):
    matrix = gauss(n, d)
    matrix[::7] = 0
    matrix[1::5] = matrix[1].clone()
    return matrix


HARD = {
    "gauss": gauss(400, 8),
    "heavy": heavy_tailed(400, 8),
    "spikes": spikes(400, 8),
    "scaled": scaled_rows(400, 8),
    "ill": conditioned(400, 8, 1e6),
    "deficient": deficient(400, 8, 3),
    "holed": holed(400, 8),
    "small": gauss(400, 8) * 1e-6,
    "large": heavy_tailed(400, 8) * 1e6,
    "square": gauss(8, 8),
    "wide": gauss(4, 8),
}


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("name", HARD)
def test_fixed_point_and_sum(name, p):
    matrix = HARD[name]
    weights = la.lewis_weights(matrix, p)
    live = matrix.any(-1)
    powers = lewis_powers(matrix, weights, p)
    assert (weights[~live] == 0).all()
    assert (weights[live].log() - powers[live].log()).abs().max() <= 1.1e-6
    assert weights.sum().item() == pytest.approx(torch.linalg.matrix_rank(matrix).item(), rel=2e-6)


@pytest.mark.parametrize("p", [2.5, 4, 7])
def test_the_lewis_ellipsoid_agrees(p):
    matrix = heavy_tailed(15, 3)
    torch.testing.assert_close(la.lewis_weights(matrix, p), lewis_ellipsoid(matrix, p), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gauss", "ill", "deficient", "holed"])
def test_p_2_is_leverage(name):
    exact = leverage_by_svd(HARD[name], 8 * 2.3e-16)
    torch.testing.assert_close(la.lewis_weights(HARD[name], 2), exact, rtol=1e-8, atol=1e-14)
    torch.testing.assert_close(Lewis(2)(HARD[name]), exact, rtol=1e-8, atol=1e-14)
    torch.testing.assert_close(la.lewis_weights(HARD[name], 2 + 1e-9), exact, rtol=1e-6, atol=1e-12)


def test_batches_are_scored_one_by_one():
    batch = torch.stack([HARD["gauss"], HARD["ill"], HARD["deficient"], torch.zeros(400, 8)]).reshape(2, 2, 400, 8)
    weights = la.lewis_weights(batch, 4, tol=1e-8)
    for element, found in zip(batch.reshape(4, 400, 8), weights.reshape(4, 400), strict=True):
        torch.testing.assert_close(found, la.lewis_weights(element, 4, tol=1e-8), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_floats_of_low_rank(dtype):
    clean = deficient(500, 12, 5)
    weights = la.lewis_weights(clean.to(dtype), 4)
    assert weights.sum().item() == pytest.approx(5, rel=1e-5)
    assert (weights - la.lewis_weights(clean, 4)).abs().max() < 20 * torch.finfo(dtype).eps


def test_the_block_size_does_not_matter(monkeypatch):
    whole = la.lewis_weights(HARD["heavy"], 3)
    monkeypatch.setattr("levattention.gram.CPU_TILE", 1 << 9)
    torch.testing.assert_close(la.lewis_weights(HARD["heavy"], 3), whole, rtol=1e-9, atol=0)


@pytest.mark.parametrize("matrix", [gauss(40_000, 64).float(), conditioned(40_000, 64, 1e5)])
def test_nothing_of_the_size_of_the_keys_is_made(matrix):
    """A million keys in 64 dimensions need only vectors of length n and tiles beside the keys themselves."""

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            new = isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != owned
            if new:
                self.size = max(self.size, out.numel())
            return out

    owned = matrix.untyped_storage().data_ptr()
    with Largest() as made:
        la.lewis_weights(matrix, 3, tol=1e-2)
    # One tile, with the triangle of a QR on top of it.
    assert 0 < made.size <= (1 << 18) + 64 * 64 < matrix.numel() // 8


@pytest.mark.parametrize("p", [3, 4, 10])
def test_averaged_weights_take_over_where_the_iteration_fails(p, monkeypatch):
    """A first attempt with steps four times too long diverges; averaged weights must bring it back."""
    honest = la.lewis_weights(HARD["heavy"], p)
    descend, starts = lewis._descend, []

    def first_fails(forms, x, theta, tol):
        starts.append(theta)
        return descend(forms, x, 4 * theta if len(starts) == 1 else theta, tol)

    monkeypatch.setattr(lewis, "_descend", first_fails)
    torch.testing.assert_close(la.lewis_weights(HARD["heavy"], p), honest, rtol=1e-5, atol=0)
    assert len(starts) == 2


@pytest.mark.parametrize("p", [3, 6, 20])
def test_averaged_weights_are_one_sided(p, monkeypatch):
    """leverage(W^(1/2−1/p)K)/w ≤ (n/rank)^(1/T), that is w^(1−2/p)·r² ≤ w·(n/rank)^(1/T)."""
    matrix = HARD["heavy"]
    monkeypatch.setattr(lewis, "AVERAGED", 10)
    weights = lewis._average(lewis._Forms(matrix, p)).exp()
    forms = lewis_powers(matrix, weights, p) ** (2 / p)
    assert (weights ** (-2 / p) * forms).max() <= (400 / 8) ** (1 / 10) * (1 + 1e-9)


def test_no_convergence_is_an_error(monkeypatch):
    monkeypatch.setattr(lewis, "STEPS", 2)
    with pytest.raises(la.ConvergenceError, match=r"p = 10: residual .* tolerance 1e-06"):
        la.lewis_weights(HARD["heavy"], 10)


@pytest.mark.parametrize("p", [1, 1.5, 3, 4, 6])
@pytest.mark.parametrize("steps", [1, 2, 400])
def test_the_bounds_hold_wherever_the_iteration_stops(p, steps, monkeypatch):
    monkeypatch.setattr(lewis, "STEPS", steps)
    for matrix in (heavy_tailed(40, 3), holed(40, 3), spikes(40, 3), deficient(40, 4, 2)):
        bound = Lewis(p)(matrix)
        assert (bound <= 1).all()
        for i in range(0, 40, 4):
            assert bound[i] >= lp_sensitivity(matrix, i, p) * (1 - 1e-5)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("name", ["gauss", "heavy", "scaled", "deficient"])
def test_the_sum_of_the_bounds_is_within_the_stated_total(name, p):
    total = PowerBound(p)(HARD[name]).sum().item()
    assert total <= PowerBound(p).bound(8, 400)
    assert total <= Lewis(p).bound(8, 400) == pytest.approx(la.Power(p).total_sensitivity(8, 400), rel=1e-3)


@pytest.mark.parametrize("p", [4, 6])
def test_the_lift_bounds_the_sensitivity_and_the_smaller_is_taken(p):
    for matrix in (heavy_tailed(60, 3), spikes(60, 3), conditioned(60, 3, 1e5), deficient(60, 4, 2)):
        lifted, bound = Lift(p)(matrix), PowerBound(p)(matrix)
        torch.testing.assert_close(bound, torch.minimum(lifted, Lewis(p)(matrix)), rtol=0, atol=0)
        for i in range(0, 60, 5):
            assert bound[i] >= lp_sensitivity(matrix, i, p) * (1 - 1e-5)


def test_the_lift_is_the_leverage_of_the_tensor_power():
    matrix = gauss(300, 4)
    features = la.features.TensorPower(2)(matrix)
    torch.testing.assert_close(Lift(4)(matrix), leverage_by_svd(features, 1e-12), rtol=1e-9, atol=0)
    torch.testing.assert_close(Lift(2)(matrix), leverage_by_svd(matrix, 1e-12), rtol=1e-9, atol=0)
    torch.testing.assert_close(Lift(4)(torch.stack([matrix, 2 * matrix]))[1], Lift(4)(matrix), rtol=1e-9, atol=0)


def test_whitening_saves_the_lift_from_the_condition_number():
    well = conditioned(300, 4, 1.0)
    ill = well @ torch.diag(torch.logspace(0, -5, 4, dtype=torch.float64))
    torch.testing.assert_close(Lift(6)(ill), Lift(6)(well), rtol=1e-7, atol=0)


def test_the_lift_is_taken_only_where_it_says_something():
    assert PowerBound(4).lifts(torch.zeros(2080, 64))
    assert not PowerBound(4).lifts(torch.zeros(2079, 64))
    assert not PowerBound(6).lifts(torch.zeros(1, 64).expand(100_000, 64))
    assert not PowerBound(3).lifts(torch.zeros(100, 2))
    with pytest.raises(ValueError, match=r"takes 45,760 columns, a Gram of 16\.8 GB"):
        Lift(6)(gauss(100, 64))
    with pytest.raises(ValueError, match="even integer"):
        Lift(3)


@given(matrix=keys(), p=st.sampled_from(POWERS))
@settings(max_examples=60, deadline=None)
def test_any_keys(matrix, p):
    weights = la.lewis_weights(matrix, p)
    assert ((weights >= 0) & (weights <= 1 + 1e-6)).all()
    assert weights.sum().item() == pytest.approx(int(la.Gram.of(matrix).rank()), rel=1e-5)
    # σ is at least the weight that the key itself, used as a query, puts on it.
    own = (matrix @ matrix.mT).abs()
    share = (own / own.amax(0).clamp(min=1e-300)) ** p
    floor = share.diagonal() / share.sum(0).clamp(min=1e-300)
    assert (Lewis(p)(matrix) >= floor * (1 - 1e-7)).all()


def test_bad_input():
    with pytest.raises(ValueError, match=r"expected a finite number >= 1, got 0\.5"):
        la.lewis_weights(torch.eye(3), 0.5)
    with pytest.raises(ValueError, match="expected a finite number >= 1, got nan"):
        Lewis(float("nan"))
    with pytest.raises(ValueError, match="tol: expected a positive"):
        la.lewis_weights(torch.eye(3), 3, tol=0.0)
    with pytest.raises(ValueError, match="row 1 holds nan"):
        la.lewis_weights(torch.tensor([[1.0], [float("nan")]]), 3)
