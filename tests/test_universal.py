"""Scores -> U: the comparison rule, ties, static shapes, and what bad input is told."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import levattention as la
from levattention.scorers import Leverage, Norm, Random
from levattention.universal import best_first, capacity, reaches, select_above, select_top
from strategies import conditioned, keys


def members(u):
    return set(u.index[u.valid].tolist())


def test_the_set_is_every_key_that_reaches_eps(generator):
    matrix = torch.randn(2, 3, 200, 8, generator=generator)
    u = la.universal_set(matrix, eps=0.06)
    scores = la.leverage_scores(matrix)
    assert torch.equal(u.mask(200), scores >= 0.06)
    assert torch.equal(u.size, (scores >= 0.06).sum(-1))
    assert u.index.dtype == torch.int64
    assert u.scores.dtype == torch.float64
    assert u.index.shape == (2, 3, 8 / 0.06 // 1)
    assert (u.index[~u.valid] == 0).all()
    assert (u.scores[~u.valid] == 0).all()
    assert (u.eps == 0.06).all()
    assert u.eps.shape == (2, 3)
    assert (u.scores.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(u.scores, scores.gather(-1, u.index) * u.valid)


def test_many_ties_exactly_at_eps_lose_no_key():
    # 64 directions, each held by 16 keys: every score is 1/16 up to rounding, and |U| is exactly d/ε.
    rotation = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64)).Q
    matrix = torch.eye(64, dtype=torch.float64).repeat(16, 1) @ rotation
    u = la.universal_set(matrix, eps=1 / 16)
    assert u.size == 1024
    assert members(u) == set(range(1024))


@pytest.mark.parametrize("eps", [0.1, 0.3, 1 / 3, 0.7, 1.0])
def test_capacity_holds_all_ties(eps):
    count = int(1 / eps + 1e-9)
    assert capacity(10.0, eps, 10**6) >= 10 * count
    assert capacity(10.0, eps, 7) == 7


def test_the_buffer_grows_rather_than_truncate():
    u = select_above(torch.full((5,), 0.5, dtype=torch.float64), 0.25, cap=2)
    assert u.size == 5


def test_top_k_and_its_certified_eps(generator):
    matrix = torch.randn(4, 100, 8, generator=generator)
    scores = la.leverage_scores(matrix).sort(dim=-1, descending=True).values
    u = la.universal_set(matrix, k=10)
    torch.testing.assert_close(u.scores, scores[..., :10])
    torch.testing.assert_close(u.eps, scores[..., 10])
    assert u.valid.all()
    assert (la.universal_set(matrix, k=100).eps == 0).all()


@pytest.mark.parametrize("scorer", [Norm(), Random(1)])
def test_baselines_certify_nothing(scorer, generator):
    matrix = torch.randn(50, 8, generator=generator)
    u = la.universal_set(matrix, k=10, scorer=scorer)
    assert u.eps.isnan().all()
    assert members(u) == set(scorer(matrix).topk(10).indices.tolist())
    with pytest.raises(ValueError, match="certify no threshold"):
        la.universal_set(matrix, eps=0.1, scorer=scorer)


def test_rank_condition_and_route_are_reported():
    u = la.universal_set(conditioned(100, 5, 1e5), eps=0.1)
    assert u.rank == 5
    assert u.route == "qr"
    assert u.condition.item() == pytest.approx(1e5, rel=1e-6)


def test_rows_gathers_the_keys(generator):
    matrix = torch.randn(2, 60, 4, generator=generator)
    u = la.universal_set(matrix, eps=0.12)
    rows = u.rows(matrix)
    for head in range(2):
        assert torch.equal(rows[head][u.valid[head]], matrix[head][u.index[head][u.valid[head]]])
    assert (rows[~u.valid] == 0).all()


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=30), st.data())
@settings(max_examples=200, deadline=None)
def test_best_first_breaks_ties_by_position(values, data):
    count = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert best_first(torch.tensor([values], dtype=torch.float64), count)[0].tolist() == expected


@given(keys(), st.floats(0.01, 1.0))
@settings(max_examples=100, deadline=None)
def test_size_never_exceeds_rank_over_eps(matrix, eps):
    report = Leverage().report(matrix)
    u = la.universal_set(matrix, eps=eps)
    assert int(u.size) <= int(report.rank) / (eps * (1 - 1e-9)) + 1e-6


@given(keys(), keys())
@settings(max_examples=100, deadline=None)
def test_added_rows_never_raise_a_score(matrix, more):
    d = min(matrix.shape[-1], more.shape[-1])
    # Rows of one scale: an added row 1e12 times larger would push the others under the rank rule's noise floor.
    more = more * matrix.abs().max().clamp(min=1e-12) / more.abs().max().clamp(min=1e-12)
    before = la.leverage_scores(matrix[:, :d])
    after = la.leverage_scores(torch.cat([matrix[:, :d], more[:, :d]]))
    assert (after[: len(before)] <= before + 1e-9).all()


@given(keys(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_permuting_keys_permutes_scores(matrix, random):
    order = list(range(len(matrix)))
    random.shuffle(order)
    torch.testing.assert_close(
        la.leverage_scores(matrix[order]), la.leverage_scores(matrix)[order], rtol=1e-8, atol=1e-10
    )


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 40), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_a_batch_is_a_loop(seed, batch, n, d):
    matrix = torch.randn(batch, n, d, generator=torch.Generator().manual_seed(seed))
    together = la.leverage_scores(matrix)
    torch.testing.assert_close(together, torch.stack([la.leverage_scores(m) for m in matrix]), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_set_does_not_change_with_scale(scale, generator):
    matrix = torch.randn(400, 12, generator=generator, dtype=torch.float64)
    assert members(la.universal_set(matrix, eps=0.05)) == members(la.universal_set(matrix * scale, eps=0.05))


@pytest.mark.parametrize("seed", range(5))
def test_the_set_does_not_change_under_an_invertible_map(seed):
    matrix = torch.randn(400, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mixing = conditioned(12, 12, 1e3, seed)
    eps = 0.05
    assert (la.leverage_scores(matrix) - eps).abs().min() > 1e-6
    assert members(la.universal_set(matrix, eps=eps)) == members(la.universal_set(matrix @ mixing, eps=eps))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of eps and k, got neither"),
        ({"eps": 0.1, "k": 3}, "exactly one of eps and k, got eps=0.1 and k=3"),
        ({"eps": 0.0}, r"eps: expected a number in \(0, 1\], got 0.0"),
        ({"eps": 1.5}, r"eps: expected a number in \(0, 1\], got 1.5"),
        ({"eps": float("nan")}, r"eps: expected a number in \(0, 1\], got nan"),
        ({"k": 0}, "k: expected an integer between 1 and n = 10, got 0"),
        ({"k": 11}, "k: expected an integer between 1 and n = 10, got 11"),
    ],
)
def test_bad_thresholds_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        la.universal_set(torch.randn(10, 3), **arguments)


@pytest.mark.parametrize("scorer", [None, Norm(), Random(0)])
def test_keys_that_are_not_finite_are_refused(scorer):
    matrix = torch.randn(10, 3)
    matrix[4, 1] = float("nan")
    with pytest.raises(ValueError, match="row 4 holds nan"):
        la.universal_set(matrix, k=2, scorer=scorer)


def test_the_comparison_rule():
    eps = 0.3
    scores = torch.tensor([eps, eps * (1 - 0.9e-9), eps * (1 - 1.1e-9)], dtype=torch.float64)
    assert reaches(scores, eps).tolist() == [True, True, False]
    assert select_top(scores, 3).eps == 0
