"""The functions f: their values, their shape conditions, and what they refuse."""

import math

import pytest
import torch

from levattention import Huber, Power, Softmax, Tukey

ROBUST = [Huber(), Huber(smooth=False), Tukey()]


@pytest.mark.parametrize("threshold", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("make", [Huber, lambda t: Huber(t, smooth=False), Tukey])
def test_every_threshold_is_the_unit_one_rescaled(make, threshold):
    z = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    torch.testing.assert_close(make(threshold)(z), threshold**2 * make(1.0)(z / threshold), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(make(threshold).slope(z), make(1.0).slope(z / threshold), rtol=1e-13, atol=0)


@pytest.mark.parametrize("loss", [Huber(0.5), Huber(0.5, smooth=False), Tukey(0.5)])
def test_continuous_at_the_threshold(loss):
    below, above = loss(torch.tensor([0.5 - 1e-9, 0.5 + 1e-9], dtype=torch.float64))
    assert above - below <= 4e-9
    assert below == pytest.approx(0.25, abs=4e-9)


def test_only_the_smooth_form_has_a_continuous_derivative():
    z = torch.tensor([1 - 1e-9, 1 + 1e-9], dtype=torch.float64, requires_grad=True)
    jumps = {}
    for smooth in (True, False):
        (slope,) = torch.autograd.grad(Huber(smooth=smooth)(z).sum(), z)
        jumps[smooth] = float((slope[0] - slope[1]).abs())
    assert jumps[True] < 1e-8
    assert jumps[False] == pytest.approx(1.0)


@pytest.mark.parametrize("loss", ROBUST)
def test_what_the_bounds_ask_of_f(loss):
    z = torch.linspace(1e-3, 50, 20001, dtype=torch.float64)
    value = loss(z)
    assert (value <= z.square() * (1 + 1e-15)).all()
    assert ((value / z.square()).diff() <= 1e-15).all()
    if isinstance(loss, Huber):
        assert ((value / z).diff() >= -1e-13).all()
        assert (value <= loss.linear * z).all()
    # concave in z²: the slope is the derivative, and falls
    assert (loss.slope(z).diff() <= 0).all()
    smooth = (z - 1).abs() > 1e-2
    by_difference = value.diff() / z.square().diff()
    assert ((by_difference - loss.slope((z[1:] + z[:-1]) / 2)).abs()[smooth[1:]] < 1e-3).all()


@pytest.mark.parametrize("loss", ROBUST)
def test_total_sensitivity_is_the_integral_of_the_set_sizes(loss):
    d, n = 7, 5000
    eps = torch.linspace(0, 1, 2_000_001, dtype=torch.float64)[1:]
    integral = (loss.density * d / eps).clamp(max=n).mean()
    assert loss.total_sensitivity(d, n) == pytest.approx(float(integral), rel=1e-3)
    assert loss.total_sensitivity(d, 5) == 5


def test_softmax_is_a_scaled_exponential_with_no_total_but_n():
    z = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(Softmax(1.0, scale=0.25)(z), (z / 4).exp())
    assert Softmax(1.0).total_sensitivity(3, 1000) == 1000


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, True])
def test_bad_parameters_are_named(bad):
    for make in (Huber, Tukey):
        with pytest.raises(ValueError, match="threshold: expected a finite number > 0, got"):
            make(bad)
    with pytest.raises(ValueError, match="radius: expected a finite number > 0, got"):
        Softmax(bad)
    with pytest.raises(ValueError, match="scale: expected a finite number > 0, got"):
        Softmax(1.0, scale=bad)


@pytest.mark.parametrize("bad", [0.5, math.nan, math.inf])
def test_power_below_one_is_refused(bad):
    with pytest.raises(ValueError, match="p: expected a finite number >= 1"):
        Power(bad)
