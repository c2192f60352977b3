"""Scores for Huber and Tukey: against cvxpy, brute force and the hashing reference, on hard keys."""

import cvxpy
import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import levattention as la
from levattention import Huber, Tukey
from levattention.scorers.hashing import HashedReference
from levattention.scorers.robust import Robust, huber_weights, robust_sensitivities, tukey_level, whitened
from levattention.universal import reaches
from strategies import conditioned, deficient, heavy_tailed, spikes
from sweeps import HUBER_SIZES, TUKEY_SIZES, best_shares, directions, huber, huber_kinked, tukey

LOSSES = [Huber(), Huber(smooth=False), Tukey()]


def huber_share(keys, i, size):
    """The largest share of key i among queries with ⟨q, kᵢ⟩ = size, by CLARABEL."""
    y = cvxpy.Variable(keys.shape[1])
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(cvxpy.huber(keys @ y, 1))), [keys[i] @ y == size])
    problem.solve(solver=cvxpy.CLARABEL)
    return (size**2 if size <= 1 else 2 * size - 1) / problem.value


@pytest.mark.parametrize("make", [heavy_tailed, lambda n, d: conditioned(n, d, 30.0)])
def test_huber_bounds_hold_the_convex_optimum_between_them(make):
    keys = make(40, 3)
    lower, upper = robust_sensitivities(keys, Huber())
    white = torch.linalg.qr(keys).Q.numpy()
    for i in [*lower.topk(3).indices.tolist(), 7, 23]:
        true = max(huber_share(white, i, size) for size in 2.0 ** np.arange(-2, 7, 0.5))
        assert true <= upper[i] * (1 + 1e-6)
        assert true <= lower[i] * 1.05
        assert lower[i] <= upper[i]


@pytest.mark.parametrize(
    ("loss", "f", "sizes"),
    [(Huber(), huber, HUBER_SIZES), (Huber(smooth=False), huber_kinked, HUBER_SIZES), (Tukey(), tukey, TUKEY_SIZES)],
)
def test_witnesses_come_close_to_brute_force(loss, f, sizes):
    keys = heavy_tailed(40, 2, seed=3)
    lower, upper = robust_sensitivities(keys, loss)
    shares = best_shares(keys, directions(keys, 1000), f, sizes)
    assert (shares <= upper * (1 + 1e-9)).all()
    assert (lower <= upper).all()
    assert (lower / shares).median() > 0.97
    assert (upper / shares).median() < 3


def l1_sensitivity(keys, i):
    """max |zᵢ|/Σ|zⱼ|, by HiGHS: minimise Σtⱼ with |zⱼ| ≤ tⱼ and zᵢ = 1."""
    n, d = keys.shape
    cost = np.r_[np.zeros(d), np.ones(n)]
    upper = np.block([[keys, -np.eye(n)], [-keys, -np.eye(n)]])
    bounds = [(None, None)] * d + [(0, None)] * n
    answer = linprog(cost, upper, np.zeros(2 * n), np.r_[keys[i], np.zeros(n)][None], [1.0], bounds=bounds)
    return 1 / answer.fun


def test_the_larger_of_l1_and_l2_sensitivity_is_no_bound_for_huber():
    keys = heavy_tailed(30, 2, seed=3)
    shares = best_shares(keys, directions(keys), huber, HUBER_SIZES)
    squares = la.leverage_scores(keys)
    excess = [shares[i] / max(l1_sensitivity(keys.numpy(), i), squares[i]) for i in range(len(keys))]
    assert max(excess) > 1.1


@pytest.mark.parametrize("loss", LOSSES)
def test_the_threshold_does_not_matter(loss):
    keys = heavy_tailed(200, 4)
    other = type(loss)(**{**vars(loss), "threshold": 37.0})
    torch.testing.assert_close(Robust(loss)(keys), Robust(other)(keys), rtol=0, atol=0)
    torch.testing.assert_close(Robust(loss).decide(keys, 0.1), Robust(other).decide(keys, 0.1), rtol=0, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_scale_and_coordinates_do_not_matter(loss, scale, generator):
    keys = heavy_tailed(200, 4)
    mixed = keys @ torch.randn(4, 4, generator=generator, dtype=torch.float64) * scale
    torch.testing.assert_close(Robust(loss)(keys), Robust(loss)(mixed), rtol=2e-3, atol=0)
    same = reaches(Robust(loss).decide(keys, 0.1), 0.1) == reaches(Robust(loss).decide(mixed, 0.1), 0.1)
    assert same.all()


@pytest.mark.parametrize("loss", LOSSES)
def test_batched_is_one_by_one(loss):
    keys = torch.stack([heavy_tailed(120, 4), spikes(120, 4), deficient(120, 4, 2), torch.zeros(120, 4).double()])
    together = Robust(loss).decide(keys.reshape(2, 2, 120, 4), 0.1).reshape(4, 120)
    grid = Robust(loss)(keys)
    for element, decided, scores in zip(keys, together, grid, strict=True):
        assert torch.equal(reaches(decided, 0.1), reaches(Robust(loss).decide(element, 0.1), 0.1))
        torch.testing.assert_close(scores, Robust(loss)(element), rtol=5e-3, atol=0)
        assert (scores <= 1).all()
    assert (grid[3] == 0).all()
    assert (together[3] == 0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_zero_duplicate_and_deficient_rows(loss):
    keys = deficient(150, 6, 3)
    keys[:20] = 0
    keys[30:40] = keys[50]
    scores = Robust(loss)(keys)
    assert (scores[:20] == 0).all()
    torch.testing.assert_close(scores[30:40], scores[50].expand(10), rtol=1e-9, atol=0)
    assert (Robust(loss).decide(keys, 0.05)[:20] == 0).all()
    assert reaches(Robust(loss).decide(keys, 0.05), 0.05).sum() <= 1.0021 * loss.density * 3 / 0.05
    lower, upper = robust_sensitivities(keys, loss)
    assert (lower[:20] == 0).all()
    assert (lower[20:] > 0).all()
    assert (lower <= upper).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_bf16_keys_are_scored_as_stored(loss):
    keys = heavy_tailed(150, 4).bfloat16()
    torch.testing.assert_close(Robust(loss)(keys), Robust(loss)(keys.double()), rtol=5e-3, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_scores_never_fall_below_leverage(loss):
    # A short query sees x² alone, so leverage is a lower bound.
    for keys in (heavy_tailed(300, 5), spikes(300, 5), conditioned(300, 5, 1e5)):
        assert (Robust(loss)(keys) >= la.leverage_scores(keys) * (1 - 1e-7)).all()


def test_huber_weights_satisfy_the_inequality_exactly_even_when_solved_coarsely():
    for smooth in (True, False):
        loss, white = Huber(smooth=smooth), whitened(heavy_tailed(300, 5))
        for tol in (1e-7, 0.3):
            weights, stretch = huber_weights(white, loss, 50.0, torch.ones(300, dtype=torch.float64), tol)
            gram = (white * weights.unsqueeze(-1)).mT @ white
            by_solve = (white * torch.linalg.solve(gram, white.mT).mT).sum(-1)
            torch.testing.assert_close(stretch, by_solve, rtol=1e-8, atol=0)
            allowed = loss((50 * stretch).sqrt()) / (50 * stretch)
            assert (weights <= allowed * (1 + 1e-9)).all()


def test_tukey_weights_satisfy_the_inequality():
    white = whitened(heavy_tailed(300, 5))
    weights, scores = tukey_level(white, 0.1)
    gram = (white * weights.unsqueeze(-1)).mT @ white
    stretch = (white * torch.linalg.solve(gram, white.mT).mT).sum(-1)
    assert (weights <= 1).all()
    assert (weights * stretch).max() <= 0.1 * 1.0011
    torch.testing.assert_close(scores, stretch.clamp(min=0.1), rtol=2e-3, atol=0)


@pytest.mark.parametrize(("loss", "f", "sizes"), [(Huber(), huber, HUBER_SIZES), (Tukey(), tukey, TUKEY_SIZES)])
def test_hashing_misses_nothing_and_is_looser(loss, f, sizes):
    # Each call may fail with probability 1e-6.
    keys = heavy_tailed(60, 2, seed=4)
    shares = best_shares(keys, directions(keys), f, sizes)
    hashed = HashedReference(loss, seed=1, failure=1e-6)(keys)
    assert (shares <= hashed * (1 + 1e-9)).all()
    assert hashed.sum() > 2 * Robust(loss)(keys).sum()
    assert (HashedReference(loss, seed=1)(torch.zeros(2, 5, 3)) == 0).all()


def test_bad_input_is_named():
    keys = torch.eye(3)
    with pytest.raises(ValueError, match=r"eps: expected a number in \(0, 1\]"):
        Robust(Huber()).decide(keys, 0.0)
    with pytest.raises(ValueError, match="row 1 holds nan"):
        Robust(Tukey())(torch.tensor([[1.0], [float("nan")]]))
    with pytest.raises(ValueError, match="gap: expected a number > 0"):
        robust_sensitivities(keys, Huber(), gap=0.0)
    with pytest.raises(ValueError, match="failure: expected a probability"):
        HashedReference(Huber(), seed=0, failure=1.0)
