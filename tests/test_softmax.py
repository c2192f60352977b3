"""Softmax sensitivities over a ball: against cvxpy and closed forms; certificates, blocks and bad input."""

import math

import cvxpy
import pytest
import torch

from levattention import ConvergenceError, Softmax
from levattention.scorers import softmax
from levattention.scorers.softmax import SoftmaxBall, ascend, softmax_sensitivities
from levattention.universal import capacity, reaches, select_above
from strategies import conditioned, deficient, heavy_tailed


def log_sensitivity(keys, i, radius):
    """max ⟨q, kᵢ⟩ − logsumexp(Kq) over the ball, by CLARABEL."""
    q = cvxpy.Variable(keys.shape[1])
    value = keys[i] @ q - cvxpy.log_sum_exp(keys @ q)
    problem = cvxpy.Problem(cvxpy.Maximize(value), [cvxpy.norm(q) <= radius])
    problem.solve(solver=cvxpy.CLARABEL)
    return problem.value


def cases():
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    duplicates = gauss.clone()
    duplicates[10:20] = duplicates[0]
    duplicates[20:25] = 0
    return {
        "gauss": gauss,
        "shifted": gauss + 20,
        "conditioned": conditioned(40, 4, 1e3) * 10,
        "deficient": deficient(40, 5, 2),
        "duplicates and zeros": duplicates,
        "heavy-tailed": heavy_tailed(40, 3).clamp(-20, 20),
    }


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("radius", [0.3, 3.0])
def test_bounds_hold_the_convex_optimum_between_them(name, radius):
    keys = cases()[name]
    lower, upper = softmax_sensitivities(keys, Softmax(radius), gap=1e-4)
    assert (upper <= lower * (1 + 1.1e-4)).all()
    for i in (0, 15, 22, 39):
        true = math.exp(log_sensitivity(keys.numpy(), i, radius))
        assert lower[i] <= true * (1 + 1e-5)
        assert true <= upper[i] * (1 + 1e-5)


def test_two_keys_have_a_closed_form():
    # σ = 1/(1 + exp(−R‖k₁ − k₂‖)), at the query along their difference.
    keys = torch.tensor([[1.0, 2.0], [-1.0, 0.5]], dtype=torch.float64)
    lower, upper = softmax_sensitivities(keys, Softmax(1.5, scale=0.5), gap=1e-8)
    true = 1 / (1 + math.exp(-0.75 * math.hypot(2.0, 1.5)))
    assert lower[0] == pytest.approx(true, rel=1e-7)
    assert upper[1] == pytest.approx(true, rel=1e-7)


def test_a_vertex_of_the_hull_tends_to_one_and_the_centre_does_not():
    corners = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [0.0, 0.0]], dtype=torch.float64)
    lower, upper = softmax_sensitivities(corners, Softmax(60.0))
    assert (lower[:3] > 0.99).all()
    # Unbounded queries: 1/σ is the largest exp(entropy) of weights whose mean is the key; here four equal ones.
    assert upper[3] == pytest.approx(0.25, rel=0.02)


@pytest.mark.parametrize("steps", [1, 3])
def test_an_iteration_cut_short_still_certifies(steps, monkeypatch):
    keys = cases()["conditioned"]
    exact_lower, exact_upper = softmax_sensitivities(keys, Softmax(5.0), gap=1e-5)
    monkeypatch.setattr(softmax, "STEPS", steps)
    scores = SoftmaxBall(5.0, gap=1e-5)(keys)
    assert (scores >= exact_lower * (1 - 1e-12)).all()
    assert (scores > exact_upper * 1.01).any()
    with pytest.raises(ConvergenceError, match=r"asked for 1\.00e-05"):
        softmax_sensitivities(keys, Softmax(5.0), gap=1e-5)


def test_decide_agrees_with_the_full_scores(generator):
    keys = torch.randn(2, 197, 16, generator=generator) * 2
    scorer = SoftmaxBall(4.0, scale=0.25)
    for eps in (0.02, 0.1, 0.5):
        scores = scorer.decide(keys, eps)
        lower, upper = softmax_sensitivities(keys, Softmax(4.0, scale=0.25), gap=1e-6)
        assert (scores >= lower * (1 - 1e-12)).all()
        clear = (lower >= eps) | (upper < eps)
        assert clear.float().mean() > 0.99
        assert torch.equal(reaches(scores, eps)[clear], lower[clear] >= eps)
        u = select_above(scores, eps, capacity(scorer.bound(16, 197), eps, 197))
        assert u.size.tolist() == reaches(scores, eps).sum(-1).tolist()


def test_only_undecided_keys_are_iterated(monkeypatch, generator):
    keys, rows = torch.randn(300, 8, generator=generator, dtype=torch.float64), []
    plain = softmax.objective
    monkeypatch.setattr(softmax, "objective", lambda k, t, q: rows.append(len(q)) or plain(k, t, q))
    SoftmaxBall(6.0, gap=1e-6)(keys)
    full, decided = sum(rows), len(rows)
    SoftmaxBall(6.0).decide(keys, 0.3)
    assert sum(rows[decided:]) < full / 3


def test_blocks_do_not_change_the_answer(monkeypatch, generator):
    keys = torch.randn(100, 6, generator=generator)
    whole = SoftmaxBall(3.0, gap=1e-8)(keys)
    monkeypatch.setattr(softmax, "BLOCK", 700)
    torch.testing.assert_close(SoftmaxBall(3.0, gap=1e-8)(keys), whole, rtol=3e-8, atol=0)


def test_scale_and_radius_enter_as_a_product(generator):
    keys = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    whole = SoftmaxBall(6.0, gap=1e-8)(keys)
    torch.testing.assert_close(SoftmaxBall(12.0, scale=0.5, gap=1e-8)(keys), whole, rtol=3e-8, atol=0)
    torch.testing.assert_close(SoftmaxBall(6e-6, gap=1e-8)(keys * 1e6), whole, rtol=3e-8, atol=0)


def test_equal_keys_share_alike_and_bf16_is_taken_as_stored(generator):
    torch.testing.assert_close(SoftmaxBall(9.0)(torch.ones(7, 3)), torch.full((7,), 1 / 7, dtype=torch.float64))
    keys = torch.randn(50, 4, generator=generator).bfloat16()
    torch.testing.assert_close(SoftmaxBall(2.0)(keys), SoftmaxBall(2.0)(keys.double()), rtol=1e-12, atol=0)


def test_before_any_step_the_bound_is_the_linear_one_at_the_origin(generator):
    keys = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    keys -= keys.mean(0)
    bounds = ascend(keys, torch.tensor([3]), 2.0, 1e9)
    assert bounds[1, 0] == pytest.approx(-math.log(30) + 2 * float(keys[3].norm()))


def test_bad_input_is_named():
    keys = torch.eye(3)
    with pytest.raises(ValueError, match="radius: expected a finite number > 0"):
        SoftmaxBall(0.0)
    with pytest.raises(ValueError, match="gap: expected a number > 0"):
        softmax_sensitivities(keys, Softmax(1.0), gap=-1.0)
    with pytest.raises(ValueError, match=r"eps: expected a number in \(0, 1\]"):
        SoftmaxBall(1.0).decide(keys, 2.0)
    with pytest.raises(ValueError, match="row 0 holds inf"):
        SoftmaxBall(1.0)(torch.full((2, 2), math.inf))
