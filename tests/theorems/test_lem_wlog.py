"""Lemma lem:wlog: the generalised problem for (φ, ψ) is the plain one for φ(K), ψ(Q), so identity maps are enough."""

import pytest
import torch

import levattention as la
from levattention.features import TensorPower
from oracles import attention
from strategies import heavy_tailed


@pytest.mark.parametrize("k", [2, 3])
def test_attention_through_the_lift_is_attention_under_the_power(k):
    """A = Â: squares of ⟨φ(q), φ(k)⟩ = ⟨q, k⟩^k are |⟨q, k⟩|^(2k)."""
    keys, queries, lift = heavy_tailed(80, 4), heavy_tailed(30, 4, seed=1), TensorPower(k)
    plain = attention(keys, queries, la.Power(2 * k))
    lifted = attention(lift(keys), lift(queries), la.Power(2))
    torch.testing.assert_close(lifted, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("key_map", [torch.tanh, TensorPower(2), lambda x: torch.cat([x, x.square()], -1)])
def test_the_set_of_the_mapped_keys_is_the_set_of_the_problem(key_map):
    keys = heavy_tailed(200, 4)
    mapped = la.universal_set(keys, eps=0.05, key_map=key_map)
    plain = la.universal_set(key_map(keys), eps=0.05)
    assert torch.equal(mapped.index, plain.index)
    assert torch.equal(mapped.scores, plain.scores)


def test_the_lifted_set_holds_the_true_one():
    """Queries y^⊗k are some of all tensors: σ under |x|^(2k) is at most the leverage of the lift."""
    keys = heavy_tailed(300, 4)
    lower, _ = la.sensitivities(keys, la.Power(4))
    lifted = la.universal_set(keys, eps=0.05, key_map=TensorPower(2)).mask(300)
    assert (lower[~lifted] < 0.05).all()
    assert int((lower >= 0.05).sum()) > 0
