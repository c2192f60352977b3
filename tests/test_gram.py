"""The mergeable Gram: sums, merges, ranks, and the factor it gives."""

import pytest
import torch
from jaxtyping import TypeCheckError

from levattention import Gram
from levattention.gram import factor_of_triangle, tiles, triangle
from strategies import conditioned, deficient


def test_annotations_are_enforced_here():
    with pytest.raises(TypeCheckError):
        triangle(torch.zeros(2, 3, 4))


def test_blocks_and_merges_add_up_to_the_whole(generator):
    keys = torch.randn(2, 1001, 7, generator=generator, dtype=torch.float64)
    exact = keys.mT @ keys
    parts = [Gram(7, batch=(2,)).update(part) for part in keys.split([1, 500, 0, 500], dim=-2)]
    merged = parts[3]
    for part in parts[:3]:
        merged.merge(part)
    torch.testing.assert_close(merged.matrix, exact, rtol=1e-13, atol=1e-12)
    assert merged.count == 1001


def test_weights_multiply_the_outer_products(generator):
    keys = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    weights = torch.rand(50, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(Gram.of(keys, weights).matrix, keys.mT @ torch.diag(weights) @ keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_of_short_floats_are_exact(dtype, generator):
    keys = torch.randn(3, 5, generator=generator).to(dtype)
    from fractions import Fraction

    entry = sum(Fraction(a.item()) * Fraction(b.item()) for a, b in zip(keys[:, 0], keys[:, 1], strict=True))
    assert abs(Fraction(Gram.of(keys).matrix[0, 1].item()) - entry) <= abs(entry) * Fraction(1, 2**50)


def test_mismatched_rows_and_merges_are_refused():
    with pytest.raises(ValueError, match=r"expected shape \('m', 3\), got \(5, 4\)"):
        Gram(3).update(torch.zeros(5, 4))
    with pytest.raises(ValueError, match="expected a Gram of shape"):
        Gram(3).merge(Gram(4))
    with pytest.raises(ValueError, match="one device, got rows on meta, the Gram on cpu"):
        Gram(3).update(torch.zeros(5, 3, device="meta"))


@pytest.mark.parametrize(("d", "rank"), [(256, 200), (1024, 500)])
def test_rank_by_the_triangle(d, rank):
    keys = deficient(2 * d, d, rank)
    factor = factor_of_triangle(triangle(keys), torch.finfo(torch.float64).eps)
    assert factor.rank == rank
    assert Gram.of(keys).factor().ill_conditioned


@pytest.mark.parametrize("kappa", [1e1, 5e2, 2e3, 1e6])
def test_ill_conditioned_keys_are_reported(kappa):
    factor = Gram.of(conditioned(500, 16, kappa)).factor()
    assert bool(factor.ill_conditioned) == (kappa > 1e3)
    if kappa < 1e3:
        assert factor.condition.item() == pytest.approx(kappa, rel=1e-6)


def test_tiles_cover_each_row_once(monkeypatch):
    monkeypatch.setattr("levattention.gram.CPU_TILE", 1 << 10)
    seen = torch.zeros(7, 133)
    counted = []
    for heads, rows in tiles(torch.zeros(7, 133, 4), counted.append):
        seen[heads, rows] += 1
    assert (seen == 1).all()
    assert sum(counted) == 7 * 133
    assert len(counted) > 1
