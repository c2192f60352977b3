"""Section 3 of the paper, queries: all heavy attentions from U and a normaliser, and how few rows it needs."""

import pytest
import torch

import levattention as la
from levattention.normaliser import Sampled
from oracles import attention
from strategies import heavy_tailed, spikes


def climb(keys, score, starts, steps=60):
    """Queries that gradient ascent of `score` ends in, in coordinates in which the keys are whitened."""
    _, singular, right = torch.linalg.svd(keys, full_matrices=False)
    to_query = right.mT / singular
    queries = torch.nn.functional.normalize(starts, dim=-1).requires_grad_()
    ascent = torch.optim.Adam([queries], lr=0.05, maximize=True)
    for _ in range(steps):
        ascent.zero_grad()
        score(queries @ to_query.mT).sum().backward()
        ascent.step()
    return (queries @ to_query.mT).detach()


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("keys", [heavy_tailed(1500, 5), spikes(1500, 5)], ids=["heavy-tailed", "spikes"])
def test_no_query_hides_a_heavy_key_from_the_index(keys, p):
    """Ascent raises the weight of the keys that the index does *not* hold: it never lifts one to ε.

    Then every heavy weight of every query met on the way comes back, exactly.
    """
    loss, eps = la.Power(p), 0.1
    index = la.HeavyIndex(keys, eps, loss)
    outside = ~index.universal.mask(len(keys))

    def heaviest_outside(q):
        values = loss(q @ keys.mT)
        return (values[:, outside].amax(-1) / values.sum(-1)).log()

    starts = torch.cat([torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).double(), keys[outside][:40]])
    queries = climb(keys, heaviest_outside, starts)
    weights = attention(keys, queries, loss)
    reached = float(weights[:, outside].max())
    assert 0 < reached < eps
    queries = torch.cat([queries, la.witness(keys, index.universal.index[index.universal.valid])])
    weights = attention(keys, queries, loss)
    hits = index(queries)
    assert torch.equal(hits.valid.sum(-1), (weights >= eps).sum(-1))
    assert int(hits.valid.sum()) > 5
    true = weights.gather(-1, hits.index)[hits.valid]
    torch.testing.assert_close(hits.weight[hits.valid], true, rtol=1e-9, atol=0)


@pytest.mark.parametrize("p", [1, 1.5, 3, 4])
def test_a_sample_needs_no_more_rows_for_more_keys(p):
    """|sample| ≤ c·Ψ̂ + |π = 1| with Ψ̂ = e^tol·r^max(1, p/2) and c = 2(1+δ/3)·ln(2/failure)/δ², whatever n is."""
    rule, d = Sampled(0.4, 0.1), 3
    limit = rule.multiplier * d ** max(1, p / 2) * 1.2
    sizes = []
    for n in (2000, 20_000):
        fitted = rule(heavy_tailed(n, d, seed=7), la.Power(p))
        sizes.append(fitted.rows.shape[0])
        assert sizes[-1] <= limit + 1
    assert sizes[1] < 1.5 * sizes[0]
    assert fitted.guarantee.delta == 0.4
