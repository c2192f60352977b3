"""What stands for the light keys, against explicit sums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import dense
import levattention as la
from levattention.clusters import Members, centred, k_means, tangent_slots
from levattention.query_groups import bisect
from levattention.residuals import Cluster, Drop, Sample
from test_attention import inputs, padding, same_with_gradients


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("form", ["none", "batch", "heads"])
@pytest.mark.parametrize("heavy", [0.0, 0.25, 0.5])
def test_a_sample_weighs_each_drawn_key_by_one_over_its_probability(window, form, heavy):
    q, k, v = inputs(n=30, m=30)
    given, mask = padding(2, 3, 30, form)
    got = la.attend(q, k, v, top_k=8, residual=Sample(heavy, seed=4), key_mask=given, window=window)
    draw = la.scorers.Random(4)(k.detach())
    near = dense.local(30, 30, window)
    weights = torch.zeros(2, 3, 30, 30, dtype=torch.float64)
    best = int(8 * heavy)
    for i, j in itertools.product(range(2), range(3)):
        kept = dense.top_leverage(k[i, j].detach(), mask[i, j], best)
        light = [x for x in range(30) if mask[i, j, x] and x not in kept]
        drawn = [light[x] for x in dense.best(draw[i, j, light], 8 - best)]
        weights[i, j, :, kept] = 1
        weights[i, j, :, drawn] = len(light) / len(drawn)
    weights = torch.where(near, 1.0, weights) * mask.unsqueeze(-2)
    same_with_gradients(got, dense.attention(q, k, v, weights, 5**-0.5), (q, k, v))


def test_a_sample_is_unbiased():
    """Over 400 seeds the mean estimate of Σ exp is within five standard errors of the sum itself."""
    q, k, v = (x.detach() for x in inputs(b=1, h=1, m=1, n=50))
    exact = (q @ k.mT * 5**-0.5).exp().sum()
    mask = torch.ones(1, 1, 50, dtype=torch.bool)
    chosen = la.universal_set(k, k=12)
    estimates = []
    for seed in range(400):
        slots = Sample(seed=seed)(q, k, v, chosen, mask, mask[..., :1], 5**-0.5)
        estimates.append(((q @ slots.keys.mT * 5**-0.5).squeeze() + slots.log_weight.squeeze()).exp().sum())
    estimates = torch.stack(estimates)
    assert abs(estimates.mean() - exact) < 5 * estimates.std() / 20


def test_a_sample_is_the_same_every_time_and_differs_between_heads():
    q, k, v = (x.detach() for x in inputs(n=40))
    options = {"top_k": 8, "residual": Sample(seed=1)}
    assert torch.equal(la.attend(q, k, v, **options), la.attend(q, k, v, **options))
    assert not torch.equal(la.attend(q, k, v, **options), la.attend(q, k, v, top_k=8, residual=Sample(seed=2)))


def test_with_room_for_all_light_keys_a_sample_is_full_attention():
    q, k, v = (x.detach() for x in inputs(n=21))
    mask = torch.zeros(2, 21, dtype=torch.bool)
    mask[:, :11] = True
    want = la.attend(q, k, v, top_k=21, key_mask=mask)
    torch.testing.assert_close(la.attend(q, k, v, top_k=12, key_mask=mask, residual=Sample()), want)


@pytest.mark.parametrize("heavy", [-0.1, 1.0, 2.0])
def test_bad_shares(heavy):
    for kind in (Sample, Cluster):
        with pytest.raises(ValueError, match=r"share in \[0, 1\)"):
            kind(heavy)
    with pytest.raises(ValueError, match="iterations"):
        Cluster(iterations=-1)
    for groups in (0, 3, -2):
        with pytest.raises(ValueError, match="groups: expected a power of two"):
            Cluster(groups=groups)


def test_drop_is_the_default():
    q, k, v = inputs()
    assert torch.equal(la.attend(q, k, v, top_k=5), la.attend(q, k, v, top_k=5, residual=Drop()))


CLUSTERS = {
    "default": {},
    "no queries": {"use_queries": False, "tangents": 0},
    "keys alone": {"values": 0.0},
    "one tangent": {"tangents": 1, "iterations": 8},
    "the same slots for all": {"groups": 1},
    "four groups": {"groups": 4, "iterations": 0},
}


@pytest.mark.parametrize("options", CLUSTERS)
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("form", ["none", "batch", "heads"])
@pytest.mark.parametrize("groups", [1, 2])
def test_clusters_equal_the_written_out_method(options, window, form, groups):
    """A query's local keys are seen exactly, and each slot stands for the rest of its members."""
    n, hkv = 30, 2
    q, k, v = (x.detach() for x in inputs(h=hkv * groups, hkv=hkv, m=n, n=n, e=4))
    given, mask = padding(2, hkv, n, form)
    got = la.attend(
        q, k, v, top_k=6, residual=Cluster(**CLUSTERS[options]), key_mask=given, window=window, enable_gqa=groups > 1
    )
    near, scale = dense.local(n, n, window).numpy(), 5**-0.5
    for i, j in itertools.product(range(2), range(hkv)):
        seen = mask[i, j].numpy()
        place = np.flatnonzero(seen)
        queries = q[i, j * groups : (j + 1) * groups].numpy()
        rows = (queries[:, seen].reshape(-1, 5), k[i, j].numpy()[seen], v[i, j].numpy()[seen])
        members, part, slots = dense.cluster_slots(*rows, 6, scale, **CLUSTERS[options])
        for g, row in itertools.product(range(groups), range(n)):
            if not seen[row]:
                continue  # a query that is no real one only must not disturb the others
            keys, held, log_weight = slots[part[g * len(place) + np.searchsorted(place, row)]]
            local = np.flatnonzero(near[row] & seen)
            left = np.array([1 - np.isin(place[rows], local).mean() for rows in members])
            weights = np.concatenate(
                [
                    np.exp(scale * keys @ queries[g, row] + log_weight) * left,
                    np.exp(scale * k[i, j].numpy()[local] @ queries[g, row]),
                ]
            )
            want = weights @ np.concatenate([held, v[i, j].numpy()[local]]) / weights.sum()
            np.testing.assert_allclose(got[i, j * groups + g, row].numpy(), want, rtol=1e-8, atol=1e-8)


def test_heavy_keys_are_kept_out_of_the_clusters():
    q, k, v = (x.detach() for x in inputs(b=1, h=1, m=30, n=30))
    chosen = la.universal_set(k, k=8)
    mask = torch.ones(1, 1, 30, dtype=torch.bool)
    slots = Cluster(heavy=0.5)(q, k, v, chosen, mask, mask, 5**-0.5)
    kept = chosen.index[0, 0, :4]
    for group in range(8):
        torch.testing.assert_close(slots.keys[0, 0, group, :4], k[0, 0, kept])
        torch.testing.assert_close(slots.log_weight[0, 0, group, :4], torch.zeros(4, dtype=torch.float64))
    assert slots.owner[0, 0, kept].tolist() == [0, 1, 2, 3]
    others = [x for x in range(30) if x not in kept.tolist()]
    assert slots.owner[0, 0, others].min() >= 4
    # Every key has exactly one slot, so that with tangents = 0 the weights count all keys.
    counted = Cluster(heavy=0.5, tangents=0)(q, k, v, chosen, mask, mask, 5**-0.5).log_weight.exp().sum()
    assert float(counted) == pytest.approx(30)


def test_a_slot_is_exact_at_its_own_query_and_tangent_there():
    """log Σ exp(s·q·k) of a cluster and its slot's line: same value at `at`, an error of second order around it."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(20, 6, generator=generator).double(), torch.randn(20, 3, generator=generator).double()
    at, step = torch.randn(1, 6, generator=generator).double(), torch.randn(1, 6, generator=generator).double()
    together = Members(torch.zeros(20, dtype=torch.int64), 1)
    key, value, log_weight = (x.squeeze(0) for x in tangent_slots(k, v, together, at.unsqueeze(0), 0.7))
    errors = []
    for size in (0.0, 1e-2, 1e-3):
        q = at + size * step
        errors.append(float(torch.logsumexp(0.7 * q @ k.mT, -1) - 0.7 * q @ key.mT - log_weight))
    assert abs(errors[0]) < 1e-12
    assert errors[1] > 0  # a log-sum-exp lies above its tangents
    assert errors[2] / errors[1] == pytest.approx(1e-2, rel=0.1)
    torch.testing.assert_close(value, (0.7 * at @ k.mT).softmax(-1) @ v)


@pytest.mark.parametrize("budget", [2, 6])
def test_a_group_for_each_query_is_full_attention(budget):
    """A query alone in its group is the one its slots are exact at, however few they are; so are the gradients."""
    q, k, v = inputs(n=30, m=30)
    got, want = la.attend(q, k, v, top_k=budget, residual=Cluster(groups=32)), la.attend(q, k, v, top_k=30)
    torch.testing.assert_close(got, want)
    for ours, theirs in zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("m", [1, 5, 21, 32])
def test_queries_are_shared_out_equally_and_like_ones_together(groups, m):
    generator = torch.Generator().manual_seed(m)
    points = torch.randn(3, m, 4, generator=generator)
    real = torch.rand(3, m, generator=generator) < torch.tensor([[1.0], [0.5], [0.0]])
    order = bisect(points, torch.eye(4).expand(3, 4, 4), real, groups)
    assert order.shape == (3, groups, -(-m // groups))
    assert torch.equal(order.flatten(-2).sort(-1).values, torch.arange(order[0].numel()).expand(3, -1))
    padded = torch.cat([real, torch.zeros(3, groups, dtype=torch.bool)], -1)
    counts = padded.gather(-1, order.flatten(-2)).view(order.shape).sum(-1)
    assert (counts.amax(-1) - counts.amin(-1)).max() <= 1
    # What is not real does not matter.
    noise = torch.where(real.unsqueeze(-1), points, 1e3)
    for i in range(3):
        sets = [
            {frozenset(x for x in g.tolist() if padded[i, x]) for g in way[i]}
            for way in (order, bisect(noise, torch.eye(4).expand(3, 4, 4), real, groups))
        ]
        assert sets[0] == sets[1]
    if groups == 2 and m == 32:
        # Two clouds far apart are told apart.
        clouds = points.clone()
        clouds[:, ::2] += 100.0
        halves = bisect(clouds, torch.eye(4).expand(3, 4, 4), torch.ones_like(real), 2) % 2
        assert ((halves == 0).all(-1) != (halves == 1).all(-1)).all()


def test_with_many_keys_outliers_keep_their_slots_and_every_key_its_nearest_centre():
    """Seeds come from some of 3,000 keys, but from all that lie far out, of visible ones alone."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3000, 4, generator=generator)
    far = torch.tensor([1, 77, 1500, 2998])
    keys[:, far] = 50 * torch.eye(4)
    light = torch.rand(2, 3000, generator=generator) < 0.6
    light[:, far] = True
    light[1] = False
    light[1, far] = True
    light[1, 5] = True
    points = centred(keys, light)
    owner = k_means(points, torch.eye(4).expand(2, 4, 4), light, 12, 1)
    assert (owner[~light] == 12).all()
    for i in range(2):
        for key in far:
            assert (owner[i] == owner[i, key]).sum() == 1

    def cost(owner):
        means = torch.stack([points[0][owner == c].mean(0) for c in owner.unique() if c < 12])
        return float(torch.cdist(points[0][light[0]], means).amin(-1).square().sum())

    assert (
        cost(k_means(points, torch.eye(4).expand(2, 4, 4), light, 12, 6)[0])
        <= cost(owner[0])
        <= cost(k_means(points, torch.eye(4).expand(2, 4, 4), light, 12, 0)[0])
    )


def test_enough_slots_for_every_visible_key_is_full_attention():
    q, k, v = (x.detach() for x in inputs(n=21))
    mask = torch.zeros(2, 21, dtype=torch.bool)
    mask[:, 4:13] = True
    want = la.attend(q, k, v, top_k=21, key_mask=mask)
    torch.testing.assert_close(la.attend(q, k, v, top_k=12, key_mask=mask, residual=Cluster()), want)


def test_duplicates_and_constant_values_cluster_without_loss():
    """Five distinct keys, many copies: five slots hold them all, whatever the values' variance."""
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randn(1, 1, 5, 4, generator=generator, dtype=torch.float64)
    k, q = distinct.repeat(1, 1, 6, 1), torch.randn(1, 1, 7, 4, generator=generator, dtype=torch.float64)
    for v in (torch.ones_like(k), distinct.flip(-2).repeat(1, 1, 6, 1), torch.zeros_like(k)):
        for options in CLUSTERS.values():
            got = la.attend(q, k, v, top_k=5, residual=Cluster(**options))
            torch.testing.assert_close(got, la.attend(q, k, v, top_k=30))


def test_padding_in_the_queries_does_not_reach_the_clusters():
    q, k, v = (x.detach() for x in inputs(n=21))
    padded = [torch.cat([x, torch.full_like(x, 1e3)], -2) for x in (q, k, v)]
    mask = torch.arange(42).expand(2, 42) < 21
    got = la.attend(*padded, top_k=6, residual=Cluster(), key_mask=mask)[..., :21, :]
    torch.testing.assert_close(got, la.attend(q, k, v, top_k=6, residual=Cluster()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_clusters_in_lower_precision(dtype):
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs(n=50, m=50))
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1] = False
    out = la.attend(q, k, v, top_k=6, residual=Cluster(), key_mask=mask)
    assert out.dtype == dtype
    assert not out[1].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), (q, k, v)))


@pytest.mark.parametrize("shape", [(0, 2, 10, 4), (2, 0, 10, 4)])
def test_no_heads_give_no_heads(shape):
    q = torch.randn(shape)
    for residual in (Drop(), Cluster()):
        assert la.attend(q, q, q, top_k=3, residual=residual).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shown", [1.0, 0.5, 0.05])
@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_gradients_stay_finite_however_little_a_slot_is_attended_to(scale, shown, dtype):
    """Logits in the hundreds leave slots with attention below the smallest number, and groups without a query."""
    generator = torch.Generator().manual_seed(0)
    for groups in (1, 8):
        leaves = [scale * torch.randn(2, 2, 70, 16, generator=generator, dtype=dtype) for _ in range(3)]
        leaves = [x.requires_grad_() for x in leaves]
        mask = torch.rand(2, 70, generator=generator) < shown
        mask[:, 0] = True
        out = la.attend(*leaves, top_k=8, residual=Cluster(groups=groups), key_mask=mask)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().mean(), leaves))
