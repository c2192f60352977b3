"""Legal calls at the edge of what the kernels take: refused, left to plain torch, or right."""

import sys

import pytest
import torch
from torch.autograd import forward_ad

import levattention as la
from levattention import kernels
from levattention.kernels import running, short
from levattention.scorers import Norm
from test_attend import attended, close, heads, routes  # noqa: F401 (a fixture)


class Signed:
    """Scores of both signs, which certify nothing."""

    certified = False

    def __call__(self, keys):
        return keys[..., 0].double() - 0.5


def test_scores_that_certify_nothing_may_be_negative(routes, device):  # noqa: F811
    leaves = heads(device)
    ours, plain, seen = routes(lambda: attended(leaves, top_k=12, scorer=Signed()))
    assert "gathered_attention" in seen
    close(ours, plain)
    _, chosen = la.attend(*leaves, top_k=12, scorer=Signed(), return_set=True)
    assert chosen.valid.all()
    want = Signed()(leaves[1].detach()).topk(12).values
    torch.testing.assert_close(chosen.scores, want)


@pytest.mark.parametrize("chunk", [40, 10**6, sys.maxsize])
def test_a_chunk_longer_than_the_sequence_is_one_of_its_length(chunk, routes, device):  # noqa: F811
    leaves = heads(device, n=40)
    options = {"top_k": 8, "is_causal": True, "window": 3}
    ours, plain, seen = routes(lambda: attended(leaves, chunk=chunk, **options))
    assert "causal_attention" in seen
    close(ours, plain)
    close(ours, attended(leaves, chunk=40, **options))


def test_more_heads_than_a_launch_takes_go_the_plain_way(routes, device):  # noqa: F811
    assert kernels.supported(torch.zeros(1, device=device).expand(257, 255, 2, 16))
    assert not kernels.supported(torch.zeros(1, device=device).expand(257, 256, 2, 16))
    # Few key heads, but many query heads.
    q = torch.randn(1, 1 << 16, 1, 32, device=device)
    k = heads(device)[1].detach()[:1]
    ours, plain, seen = routes(lambda: la.attend(q, k, k, top_k=2, enable_gqa=True))
    assert "gathered_attention" not in seen
    close([ours], [plain])


def test_forward_mode_is_refused_not_dropped(routes, device):  # noqa: F811
    q, k, v = (x.detach() for x in heads(device, n=20))

    def tangent(causal):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, torch.ones_like(q))
            return forward_ad.unpack_dual(la.attend(dual, k, v, top_k=4, is_causal=causal, chunk=5)).tangent

    for causal in (False, True):
        with pytest.raises((NotImplementedError, RuntimeError)):
            routes(lambda causal=causal: tangent(causal))


def test_an_empty_set_gives_zeros_and_no_gradient(device):
    q, k, v = heads(device, n=20)
    none = torch.zeros(2, 2, 0, dtype=torch.int64, device=device)
    out, lse = kernels.gathered_attention(q, k, v, none, scale=0.2)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_views_that_are_negated_lazily(routes, device):  # noqa: F811
    q, k, v = (torch.randn(2, 2, 30, 16, 2, device=device) for _ in range(3))
    negated = [torch.view_as_complex(x).conj().imag for x in (q, k, v)]
    assert all(x.is_neg() for x in negated)
    ours, _, seen = routes(lambda: la.attend(*negated, top_k=5))
    assert "gathered_attention" in seen
    torch.testing.assert_close(ours, la.attend(*(x.resolve_neg() for x in negated), top_k=5), rtol=1e-5, atol=1e-5)


def test_rows_gigabytes_apart_are_left_to_kernels_that_count_in_64_bits(device):
    assert short.takes(torch.empty((1, 1, 1024, 64), dtype=torch.float16, device=device))
    far = torch.empty((1024, 1, 1, 1 << 21), dtype=torch.float16, device="meta").movedim(0, 2)[..., :64]
    assert far.shape == (1, 1, 1024, 64)
    assert not short.takes(far)


def test_tensors_of_another_device_are_named(device):
    q, k, v = (x.detach() for x in heads(device, n=20))
    with pytest.raises(ValueError, match="expected all tensors on one device, got key_mask on meta"):
        la.attend(q, k, v, top_k=4, key_mask=torch.ones(2, 20, dtype=torch.bool, device="meta"))
    chosen = la.universal_set(k, k=4)
    index = chosen.index.to("meta")
    moved = la.UniversalSet(index, chosen.valid.to("meta"), chosen.scores.to("meta"), chosen.eps.to("meta"))
    with pytest.raises(ValueError, match="expected all tensors on one device, got universal on meta"):
        la.attend(q, k, v, universal=moved)


@pytest.mark.parametrize("d", [64, 65, 129])
def test_the_sets_of_long_prompts_take_no_more_room_than_told(d, monkeypatch, device):
    """Live bytes of fp32 and fp64 scratch over several stretches, results and scores of single keys aside."""
    from memory import Peak

    limit = 1 << 22
    monkeypatch.setattr(running, "SCRATCH", limit)
    for module in ("running", "gram_matrix", "factor", "scores", "selection"):
        monkeypatch.setattr(sys.modules[f"levattention.kernels.{module}"], "launch", lambda *_, **__: None)
    keys = torch.randn(1, 1, 2 * (3 * limit // (16 * d * d) + 1), d, device=device)
    with Peak(at_least=8 * d * d) as peak:
        kernels.running_top_k(keys, 1, chunk=2)
    assert limit // 4 < peak.bytes <= 1.05 * limit


def test_a_mask_of_nan_by_another_scorer_is_seen(routes, device):  # noqa: F811
    """Keys that may not be seen may hold anything, whatever scores them."""
    q, k, v = (x.detach() for x in heads(device))
    mask = torch.arange(70, device=device).expand(2, 70) < 60
    hidden = ~mask[:, None, :, None]
    k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
    ours, plain, _ = routes(lambda: la.attend(q, k, v, top_k=12, scorer=Norm(), key_mask=mask))
    assert plain.isfinite().all()
    close([ours], [plain])
