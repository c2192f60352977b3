"""Causal `attend` against a masked reference that follows the same recurrence, and what its sets certify."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import dense
import levattention as la
from levattention.losses import Power
from oracles import leverage_by_svd
from test_attention import inputs, padding, same_with_gradients


def causal_weights(k, mask, m, chunk, window, *, top_k=None, eps=None):
    """0/1 weights (b, h, m, n): own chunk, window and prefix set, none after the query; and the sets themselves."""
    b, h, n, _ = k.shape
    weights, sets = torch.zeros(b, h, m, n, dtype=torch.float64), {}
    near = dense.local(m, n, window)
    for i, j in itertools.product(range(b), range(h)):
        sets[i, j] = dense.causal_sets(k[i, j].detach(), mask[i, j], m, chunk, top_k, eps)
        for c, (kept, _) in enumerate(sets[i, j]):
            for row in range(c * chunk, min((c + 1) * chunk, m)):
                place, first = row + n - m, max(c * chunk + n - m, 0)
                seen = set(kept) | {x for x in range(n) if near[row, x]} | set(range(first, place + 1))
                weights[i, j, row, [x for x in seen if x <= place]] = 1
    return weights * mask.unsqueeze(-2), sets


@pytest.mark.parametrize("budget", [{"top_k": 4}, {"eps": 0.45}], ids=["top_k", "eps"])
@pytest.mark.parametrize("window", [0, 3, 40])
@pytest.mark.parametrize("form", ["none", "batch", "heads"])
@pytest.mark.parametrize(("m", "n"), [(30, 30), (1, 30), (7, 30), (30, 23)])
@pytest.mark.parametrize("chunk", [9, 64])
def test_follows_the_recurrence(budget, window, form, m, n, chunk):
    q, k, v = inputs(h=4, hkv=2, m=m, n=n)
    given, mask = padding(2, 2, n, form)
    weights, sets = causal_weights(k, mask, m, chunk, window, **budget)
    got, used = la.attend(
        q, k, v, key_mask=given, is_causal=True, window=window, chunk=chunk, enable_gqa=True, return_set=True, **budget
    )
    wide_k, wide_v, wide = (x.repeat_interleave(2, 1) for x in (k, v, weights))
    same_with_gradients(got, dense.attention(q, wide_k, wide_v, wide, 5**-0.5), (q, k, v))
    for (i, j), chunks in sets.items():
        for c, (kept, dropped) in enumerate(chunks):
            assert sorted(used.index[i, j, c][used.valid[i, j, c]].tolist()) == sorted(kept)
            if "top_k" in budget:
                assert float(used.eps[i, j, c]) == pytest.approx(dropped, abs=1e-9)


@pytest.mark.parametrize("loss", [None, Power(2), Power(3)])
def test_losses(loss):
    q, k, v = inputs(m=30, n=30)
    weights, _ = causal_weights(k, torch.ones(2, 3, 30, dtype=torch.bool), 30, 7, 2, top_k=4)
    scale = 5**-0.5 if loss is None else 1.0
    got = la.attend(q, k, v, top_k=4, is_causal=True, chunk=7, window=2, loss=loss, scorer=la.scorers.Leverage())
    same_with_gradients(got, dense.attention(q, k, v, weights, scale, loss), (q, k, v))


@pytest.mark.parametrize("eps", [0.2, 0.5])
def test_with_eps_the_prefix_set_is_that_of_the_whole_prefix(eps):
    """The recurrence looks at survivors only; the reference scores every key of every prefix."""
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(1, 1, 400, 6, generator=generator, dtype=torch.float64)
    k = k * torch.logspace(-2, 2, 400, dtype=torch.float64).unsqueeze(-1)[torch.randperm(400, generator=generator)]
    q, v = torch.randn_like(k), torch.randn_like(k)
    _, used = la.attend(q, k, v, eps=eps, is_causal=True, chunk=32, return_set=True)
    for c in range(1, used.index.shape[2]):
        exact = (leverage_by_svd(k[0, 0, : 32 * c], 1e-14) >= eps).nonzero().squeeze(-1).tolist()
        assert sorted(used.index[0, 0, c][used.valid[0, 0, c]].tolist()) == exact


@pytest.mark.parametrize("chunk", [16, 50])
def test_with_top_k_nothing_dropped_scores_above_the_certified_eps(chunk):
    generator = torch.Generator().manual_seed(2)
    k = torch.randn(1, 2, 300, 5, generator=generator, dtype=torch.float64) * torch.rand(300, 1, generator=generator)
    _, used = la.attend(k, k, k, top_k=9, is_causal=True, chunk=chunk, return_set=True)
    for h, c in itertools.product(range(2), range(1, used.index.shape[2])):
        scores = leverage_by_svd(k[0, h, : chunk * c], 1e-14)
        outside = torch.ones(len(scores), dtype=torch.bool)
        outside[used.index[0, h, c][used.valid[0, h, c]]] = False
        assert scores[outside].max() <= used.eps[0, h, c] + 1e-9


@pytest.mark.parametrize("scorer", [la.scorers.Norm(), la.scorers.Random(5)])
def test_scores_that_ignore_other_keys_give_the_best_of_the_prefix(scorer):
    q, k, v = (x.detach() for x in inputs(m=40, n=40))
    _, used = la.attend(q, k, v, top_k=6, scorer=scorer, is_causal=True, chunk=9, return_set=True)
    scores = scorer(k)
    for i, j, c in itertools.product(range(2), range(3), range(1, used.index.shape[2])):
        kept = used.index[i, j, c][used.valid[i, j, c]].tolist()
        assert sorted(kept) == sorted(dense.best(scores[i, j, : 9 * c], 6))


def test_another_scorer_sees_the_survivors_and_the_chunk():
    class Copy:
        """Leverage under another name, so that the general route is taken."""

        certified = True

        def __call__(self, keys):
            return la.leverage_scores(keys)

        def bound(self, d, n):
            return float(min(d, n))

    generator = torch.Generator().manual_seed(3)
    k = torch.randn(1, 1, 200, 4, generator=generator, dtype=torch.float64)
    _, used = la.attend(k, k, k, eps=0.3, scorer=Copy(), is_causal=True, chunk=25, return_set=True)
    for c in range(1, used.index.shape[2]):
        needed = set((leverage_by_svd(k[0, 0, : 25 * c], 1e-14) >= 0.3).nonzero().squeeze(-1).tolist())
        assert needed <= set(used.index[0, 0, c][used.valid[0, 0, c]].tolist())


def test_a_given_set_is_seen_only_where_it_lies_before_the_chunk():
    q, k, v = inputs(m=30, n=30)
    chosen = la.universal_set(k.detach(), k=6)
    got = la.attend(q, k, v, universal=chosen, is_causal=True, chunk=10)
    seen = torch.zeros(2, 3, 30, 30, dtype=torch.float64)
    for row in range(30):
        first = row // 10 * 10
        seen[:, :, row, :first] = chosen.mask(30)[:, :, :first].double()
        seen[:, :, row, first : row + 1] = 1
    same_with_gradients(got, dense.attention(q, k, v, seen, 5**-0.5), (q, k, v))


def test_no_query_sees_a_later_key():
    """Changing the keys and values after a position leaves the outputs up to it as they were, to the last bit."""
    q, k, v = (x.detach() for x in inputs(m=60, n=60))
    for options in ({"top_k": 5}, {"eps": 0.4}, {"top_k": 5, "window": 4}, {"top_k": 5, "scorer": la.scorers.Norm()}):
        before = la.attend(q, k, v, is_causal=True, chunk=16, **options)
        later_k, later_v = k.clone(), v.clone()
        later_k[..., 37:, :], later_v[..., 37:, :] = 100.0, -100.0
        after = la.attend(q, later_k, later_v, is_causal=True, chunk=16, **options)
        assert torch.equal(before[..., :37, :], after[..., :37, :])


def test_a_chunk_as_long_as_the_sequence_is_full_causal_attention():
    q, k, v = (x.detach() for x in inputs(m=60, n=60))
    want = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(la.attend(q, k, v, top_k=1, is_causal=True, chunk=60), want)
    torch.testing.assert_close(la.attend(q, k, v, top_k=1, is_causal=True, chunk=7, window=60), want)


def test_decoding_sees_the_cache_from_its_end():
    """One query at a time against a growing cache: what each step sees is the set of the keys before it, and itself."""
    q, k, v = (x.detach() for x in inputs(m=25, n=25))
    for t in (1, 10, 24):
        last = q[..., t : t + 1, :]
        got = la.attend(last, k[..., : t + 1, :], v[..., : t + 1, :], top_k=4, is_causal=True)
        kept = la.universal_set(k[..., :t, :], k=min(4, t)).mask(t + 1)
        kept[..., t] = True
        want = dense.attention(last, k[..., : t + 1, :], v[..., : t + 1, :], kept.double().unsqueeze(-2), 5**-0.5)
        torch.testing.assert_close(got, want)
