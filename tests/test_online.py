"""Scores against the prefix: brute force, theory, and the causal set attacked."""

import math

import pytest
import torch

import levattention as la
from levattention.adversary import attack
from levattention.online import keep_forever, online_scores, online_universal_set
from strategies import deficient, heavy_tailed
from test_stream import STREAMS, growing

SHORT = {name: make for name, make in STREAMS.items() if "bf16" not in name}


def by_prefixes(matrix):
    """One offline computation for each prefix."""
    return torch.stack([la.leverage_scores(matrix[: j + 1])[-1] for j in range(len(matrix))])


@pytest.mark.parametrize("block", [5, 64])
@pytest.mark.parametrize("name", SHORT)
def test_online_scores_are_the_prefix_leverage(name, block, monkeypatch):
    monkeypatch.setattr("levattention.online._BLOCK", block)
    matrix = SHORT[name]()
    matrix = matrix[:: max(1, len(matrix) // 150)]
    torch.testing.assert_close(online_scores(matrix), by_prefixes(matrix), rtol=1e-6, atol=1e-9)


def test_heads_are_a_batch():
    heads = torch.stack([heavy_tailed(300, 5, seed) for seed in range(4)]).reshape(2, 2, 300, 5)
    found = online_scores(heads)
    for i in range(2):
        for j in range(2):
            torch.testing.assert_close(found[i, j], online_scores(heads[i, j]))


def test_each_is_at_least_the_final_leverage_and_they_sum_to_d_log_kappa():
    for matrix in (heavy_tailed(2000, 6), growing(2000, 6, -3, 3), deficient(2000, 6, 4)):
        scores = online_scores(matrix)
        assert (scores >= la.leverage_scores(matrix) - 1e-9).all()
        # Σ τ_j(K_1:j) ≤ r + log det growth: after a new direction scores 1, τ ≤ −log(1 − τ) and those logs telescope.
        grown = scores < 1 - 1e-9
        rank = int((~grown).sum())
        logs = -torch.log1p(-scores[grown])
        assert scores[grown].sum() <= logs.sum()
        singular = torch.linalg.svdvals(matrix)
        smallest_new = min(float(matrix[: j + 1].norm(dim=-1).min()) for j in range(rank))
        kappa = float(singular[0]) / smallest_new
        assert scores.sum() <= rank * (1 + 2 * math.log(kappa * len(matrix)))


@pytest.mark.parametrize("eps", [0.05, 0.2])
def test_no_causal_query_breaks_the_causal_set(eps):
    matrix = heavy_tailed(120, 4)
    u = online_universal_set(matrix, eps=eps)
    inside = u.mask(120)
    for t in range(1, 120, 7):
        outside = (~inside[: t + 1]).nonzero().squeeze(-1)
        if len(outside):
            assert attack(matrix[: t + 1], outside, steps=40, random_starts=8).weight < eps
    for j in u.index[u.valid].tolist():
        query = la.witness(matrix[: j + 1], j)
        share = (matrix[: j + 1] @ query).square()
        assert share[j] / share.sum() >= eps * (1 - 1e-7)


def test_the_causal_set_is_the_union_over_time():
    matrix = growing(200, 5, -1, 1)
    union = set()
    for t in range(200):
        scores = la.leverage_scores(matrix[: t + 1])
        union |= set((scores >= 0.1).nonzero().squeeze(-1).tolist())
    u = online_universal_set(matrix, eps=0.1)
    assert set(u.index[u.valid].tolist()) == union


def test_keep_forever_finds_the_same_set_with_more_memory():
    matrix = growing(3000, 8, -6, 6)
    reference = keep_forever(matrix, eps=0.04)
    assert reference.index.tolist() == (la.leverage_scores(matrix) >= 0.04).nonzero().squeeze(-1).tolist()
    stream = la.KeyStream(8, eps=0.04)
    for block in matrix.split(64):
        stream.update(block)
    assert len(reference.stored) > 2000 > 8 / 0.04 >= stream.stats()["kept"]
