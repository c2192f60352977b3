"""Section 3, remark on the choice of p: p > 2 finds what x² misses; p < 2 keeps small entries with fewer keys."""

import pytest
import torch

import levattention as la
from levattention.scorers import Sensitivity
from oracles import attention


def one_tall_entry(n, p, d=3):
    """Some query gives key 0 the score n^(1/p) and every other key a score of size one."""
    keys = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys[:, 0] = keys[:, 0].sign()
    keys[0] = 0
    keys[0, 0] = n ** (1 / p)
    return keys


@pytest.mark.parametrize("p", [3, 4, 6])
def test_p_above_2_finds_what_the_square_misses(p):
    n, eps = 20_000, 0.3
    keys = one_tall_entry(n, p)
    query = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    assert attention(keys, query, la.Power(p))[0, 0] == pytest.approx(0.5, rel=1e-3)
    assert 0 in la.universal_set(keys, eps=eps, scorer=Sensitivity(la.Power(p))).index.tolist()
    assert not la.universal_set(keys, eps=eps).valid.any()
    # Under x² the same entry is only of the order of n^(2/p − 1): an inverse polynomial.
    assert la.leverage_scores(keys)[0].item() == pytest.approx(n ** (2 / p - 1), rel=0.05)


def pairs_and_crowds(eps, axes=3):
    """On one axis a key of size 1 and one of size ε; on each other axis a key of size 1 and 1/ε² of size ε."""
    crowd = round(1 / eps**2)
    keys = torch.zeros(2 + axes * (1 + crowd), 1 + axes, dtype=torch.float64)
    keys[0, 0], keys[1, 0] = 1.0, eps
    for axis in range(axes):
        first = 2 + axis * (1 + crowd)
        keys[first, 1 + axis] = 1.0
        keys[first + 1 : first + 1 + crowd, 1 + axis] = eps
    return keys


@pytest.mark.parametrize("eps", [0.2, 0.1, 0.05])
def test_p_below_2_keeps_a_small_entry_with_fewer_keys(eps):
    """The entry ε next to a 1 has weight ε² under x² and ε under |x|, up to 1 + ε."""
    keys = pairs_and_crowds(eps)
    query = torch.zeros(1, 4, dtype=torch.float64)
    query[0, 0] = 1
    assert attention(keys, query, la.Power(2))[0, 1] == pytest.approx(eps**2 / (1 + eps**2))
    assert attention(keys, query, la.Power(1))[0, 1] == pytest.approx(eps / (1 + eps))
    by_square = la.universal_set(keys, eps=eps**2 / 2)
    by_absolute = la.universal_set(keys, eps=eps / 2, loss=la.Power(1))
    assert 1 in by_square.index[by_square.valid].tolist()
    assert 1 in by_absolute.index[by_absolute.valid].tolist()
    # The square pays for its low threshold with the whole crowd: d/ε² keys against d/ε.
    assert int(by_square.size) >= 3 / eps**2
    assert int(by_absolute.size) <= 2 * 4 / eps
    # At the threshold that suffices for |x|, the square loses the entry.
    assert 1 not in la.universal_set(keys, eps=eps / 2).index[: int(la.universal_set(keys, eps=eps / 2).size)].tolist()
