"""Key maps: the symmetric tensor power, callables, and what is refused."""

import math

import pytest
import torch

import levattention as la
from levattention.features import Identity, TensorPower, map_keys


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("d", [1, 2, 5])
def test_inner_products_of_the_lift_are_powers(k, d, generator):
    x = torch.randn(2, 7, d, generator=generator, dtype=torch.float64)
    y = torch.randn(2, 9, d, generator=generator, dtype=torch.float64)
    lift = TensorPower(k)
    assert lift(x).shape == (2, 7, math.comb(d + k - 1, k)) == (2, 7, lift.width(d))
    torch.testing.assert_close(lift(x) @ lift(y).mT, (x @ y.mT) ** k, rtol=1e-12, atol=1e-12)


def test_the_lift_has_no_redundant_column(generator):
    keys = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    assert torch.linalg.matrix_rank(TensorPower(3)(keys)) == TensorPower(3).width(4) == 20


def test_blocks_are_lifted_alone_and_short_floats_in_fp64(generator):
    keys = torch.randn(20, 3, generator=generator).bfloat16()
    lifted = TensorPower(2)(keys)
    assert lifted.dtype == torch.float64
    assert torch.equal(lifted, torch.cat([TensorPower(2)(part) for part in keys.split(7)]))
    assert torch.equal(lifted, TensorPower(2)(keys.double()))


def test_sizes_that_cannot_fit_are_refused_with_their_size():
    with pytest.raises(ValueError, match=r"has 45,760: .* and 16\.8 GB for a Gram"):
        TensorPower(3)(torch.zeros(10, 64))
    with pytest.raises(ValueError, match=r"16\.6 GB for shape \(1000000, 64\)"):
        TensorPower(2)(torch.zeros(1, 64).expand(1_000_000, 64))


@pytest.mark.parametrize("k", [0, -1, True])
def test_bad_powers(k):
    with pytest.raises(ValueError, match="expected an integer >= 1"):
        TensorPower(k)


def test_identity_and_no_map_change_nothing(generator):
    keys = torch.randn(50, 4, generator=generator)
    assert map_keys(Identity(), keys) is keys
    assert map_keys(None, keys) is keys
    assert Identity().width(4) == 4
    plain, mapped = la.universal_set(keys, eps=0.1), la.universal_set(keys, eps=0.1, key_map=Identity())
    assert torch.equal(plain.index, mapped.index)


def test_any_callable_is_a_key_map(generator):
    keys = torch.randn(3, 60, 4, generator=generator, dtype=torch.float64)
    mapped = la.universal_set(keys, k=9, key_map=torch.tanh)
    assert torch.equal(mapped.index, la.universal_set(torch.tanh(keys), k=9).index)


@pytest.mark.parametrize(
    ("key_map", "message"),
    [
        (lambda x: x[1:], r"expected shape \(6, 'D'\), got \(5, 2\)"),
        (lambda x: x.sum(-1), r"expected shape \(6, 'D'\), got \(6,\)"),
        (lambda x: x[None], r"expected shape \(6, 'D'\), got \(1, 6, 2\)"),
        (lambda x: x[:, :0], r"expected shape \(6, 'D'\), got \(6, 0\)"),
        (lambda x: x.long(), "expected floating features, got torch.int64"),
        (lambda x: x.tolist(), "expected a tensor .* got list"),
        (lambda x: x / 0, "row 0 holds"),
    ],
)
def test_a_map_of_the_wrong_shape_is_named(key_map, message):
    with pytest.raises(ValueError, match=message):
        la.universal_set(torch.ones(6, 2), eps=0.1, key_map=key_map)
