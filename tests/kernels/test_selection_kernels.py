"""Gram, whitening, leverage and top-k against their plain torch twins."""

import pytest
import torch

import reference
from levattention import kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("b", "n", "d"), [(2, 1, 32), (2, 197, 64), (1, 70, 80), (1, 300, 96), (1, 129, 128), (1, 40, 256)]
)
def test_gram_matches_fp64(dtype, b, n, d, device):
    keys = draw(b, n, d, dtype=dtype, device=device)
    exact = reference.gram(keys)
    got = kernels.gram(keys)
    assert got.dtype == torch.float64
    assert torch.equal(got, got.mT)
    assert (got - exact).abs().max() <= 2e-6 * exact.abs().max()
    precise = kernels.gram(keys, precise=True)
    assert (precise - exact).abs().max() <= 1e-13 * exact.abs().max()


def test_gram_of_many_tiles_is_deterministic_and_does_not_drift(device):
    keys = draw(1, 3000, 32, device=device) + 3.0
    exact = reference.gram(keys)
    got = kernels.gram(keys)
    assert torch.equal(got, kernels.gram(keys))
    assert (got - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_masked_rows_are_not_read(device):
    keys = draw(2, 3, 90, 32, device=device)
    mask = draw(2, 1, 90, seed=1, device=device) > 0
    exact = reference.gram(keys, mask)
    keys = keys.masked_fill(~mask.unsqueeze(-1), float("nan"))
    assert (kernels.gram(keys, mask) - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert (kernels.gram(keys, mask, precise=True) - exact).abs().max() <= 1e-13 * exact.abs().max()


def test_strided_keys_of_a_fused_projection(device):
    batch, n, heads, d = 2, 77, 3, 32
    _, keys, _ = draw(batch, n, 3, heads, d, device=device).permute(2, 0, 3, 1, 4)
    assert not keys.is_contiguous()
    exact = reference.gram(keys)
    assert (kernels.gram(keys) - exact).abs().max() <= 2e-6 * exact.abs().max()
    whitening = kernels.whiten(exact)
    assert torch.equal(kernels.leverage(keys, whitening), kernels.leverage(keys.contiguous(), whitening))
    assert torch.equal(kernels.select(keys, 9), kernels.select(keys.contiguous(), 9))


@pytest.mark.parametrize("d", [16, 32, 64, 80, 96, 128, 256])
def test_whitening_gives_leverage(d, device):
    keys = draw(2, 3 * d + 1, d, device=device)
    p = kernels.whiten(reference.gram(keys))
    scores = (keys.double() @ p.double()).square().sum(-1)
    assert (scores / reference.leverage(keys) - 1).abs().max() < 1e-5
    if d <= 128:
        assert torch.equal(p, p.triu())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_whitening_does_not_see_scale(scale, device):
    keys = draw(100, 33, device=device)
    keys = keys * torch.logspace(-3, 3, 33, device=device)
    got = kernels.leverage(keys * scale, kernels.whiten(kernels.gram(keys * scale)))
    assert (got / reference.leverage(keys) - 1).abs().max() < 1e-4


def dependent(case, device):
    """Keys without full column rank, exactly: small integers, so that no rounding hides a dependence."""
    generator = torch.Generator().manual_seed(3)
    if case == "fewer rows than columns":
        return torch.randint(-3, 4, (2, 40, 64), generator=generator).float().to(device)
    keys = torch.randint(-3, 4, (2, 200, 96), generator=generator).float().to(device)
    if case == "repeated columns":
        keys[..., 5], keys[..., 77], keys[..., 40] = keys[..., 3] * 2, keys[..., 70] + keys[..., 2], 0
    if case == "low rank":
        keys = torch.randint(-3, 4, (2, 200, 20), generator=generator).float().to(device)
        keys = keys @ torch.randint(-2, 3, (20, 96), generator=generator).float().to(device)
    if case == "zero rows":
        keys[:, 50:] = 0
    if case == "all zero":
        keys = keys * 0
    return keys


CASES = ["fewer rows than columns", "repeated columns", "low rank", "zero rows", "all zero"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rank_deficient_keys(case, dtype, device):
    keys = dependent(case, device)
    keys = keys.to(dtype)
    exact = reference.leverage(keys, rtol=1e-9)
    got = kernels.leverage(keys, kernels.whiten(kernels.gram(keys)))
    assert torch.isfinite(got).all()
    assert got.min() >= 0
    assert got.max() <= 1
    assert (got - exact).abs().max() < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d"), [(5, 32), (197, 64), (131, 80), (200, 128), (300, 256)])
def test_leverage_matches_fp64(dtype, n, d, device):
    keys = draw(2, 2, n, d, dtype=dtype, device=device)
    exact = reference.leverage(keys)
    p = kernels.whiten(reference.gram(keys))
    got = kernels.leverage(keys, p)
    # P is rounded to 16 bits for bf16 keys; the interpreter truncates where the device rounds.
    assert (got - exact).abs().max() < (2e-4 if dtype == torch.bfloat16 else 1e-5) + 2e-4 * (n < d)


def test_leverage_of_masked_rows_is_minus_infinity(device):
    keys = draw(2, 50, 16, device=device)
    mask = draw(2, 50, seed=1, device=device) > 0
    got = kernels.leverage(keys, kernels.whiten(kernels.gram(keys, mask)), mask)
    exact = reference.leverage(keys, mask)
    assert torch.equal(got == float("-inf"), ~mask)
    assert (got - exact)[mask].abs().max() < 1e-5


@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (7, 7), (197, 32), (1000, 1), (4097, 5), (9000, 100), (20000, 600), (2500, 1500)]
)
def test_top_k_with_many_ties(n, k, device):
    scores = (draw(3, n, device=device).abs() * 4).round() / 16
    scores[1] = 0
    scores[2, n // 2 :] = float("-inf")
    assert torch.equal(kernels.top_k(scores, k), reference.top_k(scores, k))


def test_top_k_of_extreme_values(device):
    scores = torch.tensor([[0.0, 1e-45, 1e-38, 1.0, 3e38, float("inf"), 2.0, 1.0, float("-inf")]], device=device)
    for k in range(1, 10):
        assert torch.equal(kernels.top_k(scores, k), reference.top_k(scores, k))


@pytest.mark.parametrize("k", [0, 8])
def test_top_k_refuses(k, device):
    with pytest.raises(ValueError, match="k must be between 1 and n = 7"):
        kernels.top_k(torch.zeros(7, device=device), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d"), [(197, 64), (33, 32), (300, 80)])
def test_short_route_agrees_with_the_long_one(dtype, n, d, device):
    keys = draw(2, 2, n, d, dtype=dtype, device=device)
    index, scores = kernels.short_top_k(keys, 20)
    long_scores = kernels.leverage(keys, kernels.whiten(kernels.gram(keys, dtype=torch.float32)))
    assert (scores - long_scores).abs().max() < 1e-5
    assert torch.equal(index, reference.top_k(scores, 20))
    overlap = (index.unsqueeze(-1) == reference.top_k(reference.leverage(keys), 20).unsqueeze(-2)).any(-1)
    assert overlap.double().mean() >= 0.9


def test_short_route_with_a_mask(device):
    keys = draw(2, 2, 60, 32, device=device)
    mask = torch.ones(2, 1, 60, dtype=torch.bool, device=device)
    mask[1, 0, 10:] = False
    index, scores = kernels.short_top_k(keys, 20, mask)
    assert torch.equal(index, reference.top_k(scores, 20))
    assert set(index[1, 0, :10].tolist()) == set(range(10))
    assert torch.equal(scores == float("-inf"), ~mask.expand(2, 2, 60))


def test_selection_of_a_long_row(device):
    keys = draw(1, 2, 1500, 64, device=device)
    assert torch.equal(kernels.select(keys, 40), reference.top_k(reference.leverage(keys), 40))


def test_supported(device):
    keys = torch.zeros(4, 32, device=device)
    assert kernels.supported(keys)
    assert kernels.supported(keys.bfloat16())
    assert not kernels.supported(keys.double())
    assert not kernels.supported(torch.zeros(4, 257, device=device))
    assert not kernels.supported(torch.zeros(0, 32, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranking_against_condition_number(dtype, device):
    generator = torch.Generator().manual_seed(5)
    for kappa, least in ((1, 0.95), (100, 0.9 if dtype == torch.float32 else 0.7)):
        keys = reference.conditioned((1200, 64), kappa, generator, dtype).to(device)
        got = kernels.select(keys, 50)
        exact = reference.top_k(reference.leverage(keys), 50)
        assert torch.isin(got, exact).double().mean() >= least
