"""`universal_set` picks the certified scorer of each loss."""

import pytest
import torch

import levattention as la
from levattention.adversary import attack
from levattention.scorers import Leverage, PowerBound, Robust, SoftmaxBall
from levattention.universal import default_scorer
from strategies import heavy_tailed

LOSSES = {
    la.Power(2): Leverage,
    la.Power(1): PowerBound,
    la.Power(4): PowerBound,
    la.Huber(): Robust,
    la.Tukey(2.0): Robust,
    la.Softmax(1.0): SoftmaxBall,
}


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_each_loss_has_its_scorer(loss):
    assert type(default_scorer(loss)) is LOSSES[loss]


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if not isinstance(loss, la.Softmax)], ids=str)
def test_eps_and_k_hold_against_a_query_search(loss):
    keys = heavy_tailed(150, 3)
    for u in (la.universal_set(keys, eps=0.2, loss=loss), la.universal_set(keys, k=12, loss=loss)):
        outside = (~u.mask(150)).nonzero().squeeze(-1)
        assert attack(keys, outside, loss=loss, steps=40).weight <= float(u.eps) * (1 + 1e-9)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_certified_bounds_are_in_order(loss):
    keys = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lower, upper = la.sensitivities(keys, loss, gap=0.05)
    assert (lower <= upper).all()
    assert (upper <= 1).all()
    assert (lower > 0).all()


def test_a_loss_of_ones_own_needs_a_scorer():
    class Cubic:
        def __call__(self, z):
            return z.abs() ** 3

        def total_sensitivity(self, d, n):
            return float(n)

    with pytest.raises(ValueError, match="give a scorer with other losses"):
        la.universal_set(torch.eye(3), eps=0.5, loss=Cubic())
