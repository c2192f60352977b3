"""Leverage scores against SVD and statsmodels on hard keys, by every route."""

import pytest
import torch

import levattention as la
from levattention.scorers import Leverage, Norm, Random
from oracles import leverage_by_svd
from strategies import conditioned, deficient, heavy_tailed, spikes

FP64_RTOL = 4 * torch.finfo(torch.float64).eps


def relative_error(found, exact):
    return ((found - exact).abs() / exact.clamp(min=1e-300)).max().item()


@pytest.mark.parametrize(
    ("kappa", "tolerance", "route"),
    [(1e1, 1e-9, "gram"), (9e2, 1e-9, "gram"), (2e3, 1e-9, "qr"), (1e4, 1e-9, "qr"), (1e6, 1e-8, "qr")],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_conditioned_keys(kappa, tolerance, route, seed):
    keys = conditioned(2000, 64, kappa, seed)
    report = Leverage().report(keys)
    exact = leverage_by_svd(keys, 64 * 2.3e-16)
    assert relative_error(report.scores, exact) <= tolerance
    assert report.route == route
    assert report.condition.item() == pytest.approx(kappa, rel=1e-6)


@pytest.mark.parametrize("make", [heavy_tailed, spikes])
def test_heavy_tails_and_spikes(make):
    keys = make(1500, 24)
    assert relative_error(la.leverage_scores(keys), leverage_by_svd(keys, 24 * 2.3e-16)) <= 1e-8


@pytest.mark.parametrize(("n", "d", "rank"), [(600, 256, 200), (1500, 1024, 500), (40, 64, 40), (7, 1024, 7)])
def test_rank_deficient_keys(n, d, rank):
    keys = deficient(n, d, rank)
    report = Leverage().report(keys)
    assert report.rank == rank
    assert report.scores.sum().item() == pytest.approx(rank, rel=1e-10)
    torch.testing.assert_close(report.scores, leverage_by_svd(keys, d * 2.3e-16), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 5e-3), (torch.bfloat16, 5e-3)])
def test_the_rank_rule_sees_through_input_rounding(dtype, tolerance):
    clean = deficient(4000, 64, 40)
    report = Leverage().report(clean.to(dtype))
    assert report.rank == 40
    assert (report.scores - leverage_by_svd(clean, 1e-12)).abs().max() <= tolerance


def test_exact_takes_keys_as_stored():
    stored = deficient(400, 16, 8).bfloat16()
    assert Leverage(rtol="exact").report(stored).rank == 16
    assert Leverage().report(stored).rank == 8


def test_zero_rows_score_zero_and_duplicates_alike(generator):
    keys = torch.randn(100, 8, generator=generator, dtype=torch.float64)
    keys[10:20] = 0
    keys[30:40] = keys[50]
    scores = la.leverage_scores(keys)
    assert (scores[10:20] == 0).all()
    torch.testing.assert_close(scores[30:40], scores[50].expand(10), rtol=1e-13, atol=0)
    torch.testing.assert_close(scores, leverage_by_svd(keys, FP64_RTOL))


def test_all_zero_keys_score_zero():
    report = Leverage().report(torch.zeros(2, 5, 3))
    assert (report.scores == 0).all()
    assert (report.rank == 0).all()


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_does_not_matter(scale, dtype):
    keys = conditioned(300, 12, 100.0).to(dtype)
    scores, scaled = la.leverage_scores(keys), la.leverage_scores(keys * torch.tensor(scale, dtype=dtype))
    # κ = 100: scaling rounds the keys, which moves a score by about eps·κ, and fp64 sums of the Gram by about 2⁻⁵²·κ².
    rtol = 20 * torch.finfo(dtype).eps * 100 + torch.finfo(torch.float64).eps * 100**2
    torch.testing.assert_close(scores, scaled, rtol=rtol, atol=0)


@pytest.mark.parametrize("route", ["gram", "qr", "svd"])
def test_three_routes_give_one_answer(route, generator):
    keys = torch.randn(3, 300, 16, generator=generator)
    torch.testing.assert_close(Leverage(route=route)(keys), Leverage()(keys), rtol=1e-11, atol=0)


def test_a_batch_takes_qr_only_where_it_must(generator):
    easy = torch.randn(300, 16, generator=generator, dtype=torch.float64)
    keys = torch.stack([easy, conditioned(300, 16, 1e6), deficient(300, 16, 5)])
    report = Leverage().report(keys)
    assert report.route == "mixed"
    assert report.rank.tolist() == [16, 16, 5]
    for element, scores in zip(keys, report.scores, strict=True):
        torch.testing.assert_close(scores, la.leverage_scores(element), rtol=1e-12, atol=0)


def test_strided_and_non_contiguous_keys(generator):
    fused = torch.randn(2, 50, 3, 4, 8, generator=generator)
    keys = fused[:, :, 1].transpose(1, 2)
    assert not keys.is_contiguous()
    torch.testing.assert_close(la.leverage_scores(keys), la.leverage_scores(keys.contiguous()), rtol=1e-13, atol=0)
    torch.testing.assert_close(
        la.leverage_scores(keys[..., ::2, ::2]),
        la.leverage_scores(keys[..., ::2, ::2].contiguous()),
        rtol=1e-13,
        atol=0,
    )


def test_statsmodels_agrees(generator):
    from statsmodels.api import OLS

    keys = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    hat = OLS(keys[:, 0].numpy(), keys.numpy()).fit().get_influence().hat_matrix_diag
    torch.testing.assert_close(la.leverage_scores(keys), torch.from_numpy(hat), rtol=1e-11, atol=0)


def test_more_accurate_than_fp32_qr():
    keys = conditioned(4000, 64, 1e4).float()
    exact = leverage_by_svd(keys, 64 * 2.3e-16)
    short = torch.linalg.qr(keys).Q.double().square().sum(-1)
    assert relative_error(la.leverage_scores(keys, rtol="exact"), exact) < relative_error(short, exact) / 1e3


@pytest.mark.parametrize("kappa", [1e1, 1e5])
def test_the_witness_attains_the_leverage(kappa):
    keys = conditioned(2 * 80, 6, kappa).reshape(2, 80, 6)
    scores = la.leverage_scores(keys)
    index = scores.topk(5).indices
    queries = la.witness(keys, index)
    share = (queries @ keys.mT).square()
    share = share / share.sum(-1, keepdim=True)
    torch.testing.assert_close(
        share.gather(-1, index.unsqueeze(-1)).squeeze(-1), scores.gather(-1, index), rtol=1e-8, atol=0
    )
    torch.testing.assert_close(la.witness(keys, 3), la.witness(keys, torch.tensor([[3], [3]])).squeeze(1))


def test_norm_is_the_squared_length(generator):
    keys = torch.randn(2, 9, 5, generator=generator)
    torch.testing.assert_close(Norm()(keys), keys.double().norm(dim=-1) ** 2)


def test_random_positions_do_not_depend_on_batch_heads_or_dtype(generator):
    keys = torch.randn(4, 3, 50, 8, generator=generator)
    scores = Random(7)(keys)
    assert torch.equal(scores[0], scores[3])
    assert torch.equal(Random(7)(keys[:1, :2].bfloat16())[0], scores[0, :2])
    assert not torch.equal(scores[0, 0], scores[0, 1])
    assert not torch.equal(scores, Random(8)(keys))


def test_random_scores_look_uniform():
    # Each decile of 200,000 uniform numbers holds 20,000 ± 134; six standard deviations fail 2e-8 of the time.
    scores = Random(3)(torch.zeros(2, 100_000, 1))
    counts = torch.histc(scores.float(), bins=10, min=0, max=1)
    assert (counts - 20_000).abs().max() < 6 * 134
    assert abs(torch.corrcoef(scores)[0, 1]) < 6 / 100_000**0.5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (torch.zeros(0, 3), "at least one row"),
        (torch.zeros(3, 0), "at least one row"),
        (torch.zeros(3), "at least two dimensions"),
        (torch.zeros(3, 3, dtype=torch.int64), "expected fp16, bf16, fp32 or fp64, got torch.int64"),
        (torch.tensor([[1.0, 2.0], [3.0, float("nan")]]), "row 1 holds nan"),
        (torch.tensor([[[1.0], [2.0]], [[3.0], [float("-inf")]]]), r"row 1 of batch element \(1,\) holds -inf"),
        (torch.full((4, 2), 1e200, dtype=torch.float64), "overflow when squared"),
    ],
)
def test_bad_keys_are_named(keys, message):
    with pytest.raises(ValueError, match=message):
        la.leverage_scores(keys)


def test_bad_witness_index_and_rtol():
    with pytest.raises(ValueError, match=r"expected positions in \[0, 4\)"):
        la.witness(torch.eye(4), 4)
    with pytest.raises(ValueError, match="rtol: expected"):
        la.leverage_scores(torch.eye(4), rtol=2.0)
