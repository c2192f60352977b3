"""Sketches: operators against explicit matrices, guarantees against drawn distortions on keys made to break them."""

import math
import re

import pytest
import torch

import levattention as la
from levattention.scorers import RightSketch, SketchedLeverage
from levattention.sketches import (
    OSNAP,
    SRHT,
    CountSketch,
    Gaussian,
    TensorSketch,
    parities,
    walsh,
)
from levattention.tails import gaussian_failure
from oracles import leverage_by_svd
from strategies import conditioned, deficient, heavy_tailed, spikes


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


ALL = [Gaussian(96), SRHT(96), OSNAP(96, 8), CountSketch(96)]


def distortion(sketch, basis, seed):
    """max |‖Πq‖² − 1| over unit q in the span of an orthonormal basis: the worst query, from an eigenproblem."""
    image = sketch.operator(len(basis), seeded(seed)) @ basis
    values = torch.linalg.eigvalsh(image.mT @ image)
    return max(1 - float(values[0]), float(values[-1]) - 1)


def side_by_side(n, d):
    basis = torch.zeros(n, d, dtype=torch.float64)
    basis[:d] = torch.eye(d, dtype=torch.float64)
    return basis


def incoherent(n, d):
    return torch.linalg.qr(torch.randn(n, d, generator=seeded(), dtype=torch.float64)).Q


@pytest.mark.parametrize("sketch", ALL)
def test_an_operator_is_its_matrix_whatever_the_layout_dtype_or_batch(sketch):
    keys = heavy_tailed(5000, 6).clamp(-50, 50).float()
    keys[keys.abs() < 0.3] = 0
    operator = sketch.operator(5000, seeded())
    # Columns of Π one thousand at a time: nothing of the blocked product is used but its value at unit vectors.
    matrix = torch.cat([operator @ torch.eye(5000)[:, s : s + 1000] for s in range(0, 5000, 1000)], -1)
    expected = matrix @ keys.double()
    torch.testing.assert_close(operator @ keys, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(operator @ keys.to_sparse_csr(), expected, rtol=1e-11, atol=1e-11)
    batch = torch.stack([keys, 2 * keys, -keys]).reshape(3, 1, 5000, 6)
    torch.testing.assert_close(operator @ batch, (matrix @ batch.double()), rtol=1e-11, atol=1e-11)
    assert torch.equal(sketch.operator(5000, seeded()) @ keys, operator @ keys)
    assert not torch.equal(sketch.operator(5000, seeded(1)) @ keys, operator @ keys)


def test_keys_are_left_as_they_were():
    keys = heavy_tailed(300, 4)
    before = keys.clone()
    for sketch in ALL:
        SketchedLeverage(sketch, 40.0, 0.5).decide(keys, 0.5)
        assert torch.equal(keys, before)


def test_walsh_is_the_hadamard_matrix_and_srht_is_an_isometry_when_nothing_is_left_out():
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(5):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    assert torch.equal(walsh(torch.eye(32, dtype=torch.float64).unsqueeze(0))[0], hadamard)
    assert parities(torch.arange(16)).tolist() == [bin(i).count("1") % 2 for i in range(16)]
    # 5000 rows are padded to 8192: blocks of 4096 are transformed alone and joined by the sign of the high bits.
    basis = incoherent(5000, 20)
    assert distortion(SRHT(8192), basis, 3) < 1e-12


def test_sparse_columns_have_s_entries_one_in_each_band():
    matrix = OSNAP(64, 8).operator(200, seeded()) @ torch.eye(200)
    assert torch.equal((matrix != 0).reshape(8, 8, 200).sum(1), torch.ones(8, 200, dtype=torch.long))
    torch.testing.assert_close(matrix.abs().amax(0), torch.full((200,), 8**-0.5, dtype=torch.float64))
    torch.testing.assert_close(matrix.square().sum(0), torch.ones(200, dtype=torch.float64))
    assert {-1.0, 0.0, 1.0} == set(matrix.sign().unique().tolist())


@pytest.mark.parametrize("basis", [side_by_side(3000, 8), incoherent(3000, 8)], ids=["spikes", "incoherent"])
@pytest.mark.parametrize(
    ("sketch", "delta"),
    [(Gaussian(384), 0.75), (CountSketch(2880), 0.5), (SRHT(1024), 0.5), (OSNAP(1024, 8), 0.5)],
)
def test_the_worst_query_stays_within_delta_as_often_as_stated(sketch, delta, basis):
    """40 seeds; the count of failures is refused only where chance would give it one time in 10⁴."""
    d, seeds = basis.shape[-1], 40
    stated = min(sketch.failure(d, len(basis), delta), max(sketch.measured(d, delta), 1e-12))
    assert stated <= 0.11
    failures = sum(distortion(sketch, basis, seed) > delta for seed in range(seeds))
    tail = sum(math.comb(seeds, j) * stated**j * (1 - stated) ** (seeds - j) for j in range(failures, seeds + 1))
    assert tail > 1e-4, (failures, stated)


def test_a_count_sketch_loses_a_direction_where_osnap_does_not():
    """Why CountSketch must have d² rows: with m = 8d two spikes share a row, and a query is seen as zero."""
    basis = side_by_side(2000, 32)
    lost = [distortion(CountSketch(256), basis, seed) for seed in range(5)]
    kept = [distortion(OSNAP(256, 8), basis, seed) for seed in range(5)]
    assert max(lost) > 0.999
    assert max(kept) < 1.2
    with pytest.raises(ValueError, match=r"needs m >= d²/\(δ²·failure\) = 40,960 rows for d = 32"):
        CountSketch(40_959).require(32, 0.5, 0.1)
    CountSketch(40_960).require(32, 0.5, 0.1)


@pytest.mark.parametrize("sketch", [Gaussian(16), SRHT(200), OSNAP(32, 8), OSNAP(64, 16), CountSketch(64)])
@pytest.mark.parametrize("kind", ["one entry", "two entries", "flat", "random"])
def test_one_vector_overshoots_no_oftener_than_stated(sketch, kind):
    n, draws = 512, 300
    z = torch.zeros(n, 1, dtype=torch.float64)
    z[: {"one entry": 1, "two entries": 2, "flat": n, "random": n}[kind]] = 1
    if kind == "random":
        z = torch.randn(n, 1, generator=seeded(), dtype=torch.float64)
    z /= z.norm()
    norms = torch.stack([(sketch.operator(n, seeded(seed)) @ z).square().sum() for seed in range(draws)])
    for delta in (0.5, 0.9, 1.5, 3.0):
        stated = sketch.overshoot(n, delta)
        spread = 4 * math.sqrt(max(stated, 1e-3) / draws)
        assert float((norms > 1 + delta + 1e-12).double().mean()) <= stated + spread
    assert abs(float(norms.mean()) - 1) < 5 * float(norms.std()) / math.sqrt(draws) + 1e-9


def test_gaussian_failure_is_a_probability_that_falls():
    assert gaussian_failure(64, 64, 0.5) == 1.0
    bounds = [gaussian_failure(m, 64, 0.5) for m in (2000, 4000, 8000)]
    assert 1 > bounds[0] > bounds[1] > bounds[2] > 0
    assert SRHT(1 << 15).failure(8, 1 << 20, 0.5) < 1e-3 < 1.0 == SRHT(256).failure(8, 1 << 20, 0.5)


HARD = {
    "spikes": spikes(1500, 8),
    "heavy-tailed": heavy_tailed(1500, 8),
    "condition 1e6": torch.cat([conditioned(1500, 8, 1e6), conditioned(1500, 8, 1e6)[:3] * 50]),
    "rank 5 of 8": torch.cat([deficient(1500, 8, 5), 30 * deficient(1500, 8, 5)[:2]]),
    "rank 5 of 8, fp32": torch.cat([deficient(1500, 8, 5), 30 * deficient(1500, 8, 5)[:2]]).float(),
    "bf16": heavy_tailed(1500, 8, seed=2).bfloat16(),
    "zero and duplicate rows": torch.cat([torch.zeros(500, 8), heavy_tailed(300, 8).repeat(3, 1).float()]),
    "scale 1e-6": heavy_tailed(1500, 8) * 1e-6,
    "scale 1e6": heavy_tailed(1500, 8) * 1e6,
    "all zero": torch.zeros(300, 3),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize(
    ("sketch", "delta"), [(Gaussian(48), 3.0), (SRHT(192), 30.0), (OSNAP(64, 16), 6.0), (Gaussian(5), 30.0)]
)
def test_no_heavy_key_is_lost_and_the_second_stage_is_exact(name, sketch, delta):
    """Four seeds each at a failure probability of 1e-4: a miss anywhere has a chance under 2 %.

    Gaussian(5) has fewer rows than the keys have columns: whole directions vanish, and rows along them must be kept.
    """
    keys, eps = HARD[name], 0.1
    exact = leverage_by_svd(keys, max(4 * torch.finfo(keys.dtype).eps, 8 * 2.3e-16))
    for seed in range(4):
        scorer = SketchedLeverage(sketch, delta, 1e-4, seed)
        candidates, scores = scorer.candidates(keys, eps), scorer.decide(keys, eps)
        assert not (~candidates & (exact >= eps)).any()
        torch.testing.assert_close(scores[candidates], exact[candidates], rtol=1e-6, atol=1e-9)
        assert (scores[~candidates] == 0).all()


def test_the_superset_is_small_where_the_sketch_embeds():
    """Every candidate's score is at most (1+δ)/(0.99·μ_min)·τ, so candidates number at most that many times d/ε."""
    keys = heavy_tailed(20_000, 16)
    chosen = SketchedLeverage(Gaussian(256), 1.0).candidates(keys, 0.05)
    assert 0 < int(chosen.sum()) <= 2 / (0.99 * 0.4) * 16 / 0.05
    assert int(chosen.sum()) < 400


def test_columns_on_the_right_of_whitened_keys_lose_nothing():
    keys = torch.cat([torch.randn(800, 32, generator=seeded()), 40 * torch.eye(32)])
    exact = leverage_by_svd(keys, 1e-6)
    for seed in range(20):
        scorer = SketchedLeverage(Gaussian(256), 1.0, 1e-4, seed, columns=48)
        assert not (~scorer.candidates(keys, 0.3) & (exact >= 0.3)).any()


def test_heads_and_sparse_keys_score_as_dense_ones():
    keys = torch.stack([heavy_tailed(700, 5), spikes(700, 5)]).float()
    scorer = SketchedLeverage(Gaussian(64), 2.0, 1e-4)
    together = scorer.decide(keys, 0.1)
    for head, scores in zip(keys, together, strict=True):
        torch.testing.assert_close(scorer.decide(head, 0.1), scores, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(scorer.decide(head.to_sparse_csr(), 0.1), scores, rtol=1e-9, atol=1e-12)


def test_attention_over_the_sketched_set_is_that_over_the_exact_one():
    """Where ε is given, attention takes what settles ε, whose sum is bounded, not the upper bounds."""
    keys = torch.stack([heavy_tailed(400, 6), spikes(400, 6)]).float()
    queries, values = (torch.randn(2, 40, 6, generator=seeded(s)) for s in (1, 2))
    values = values.repeat(1, 10, 1)
    exact = la.attend(queries, keys, values, eps=0.2)
    sketched = la.attend(queries, keys, values, eps=0.2, scorer=SketchedLeverage(Gaussian(24), 4.0, 1e-3))
    torch.testing.assert_close(sketched, exact)


def test_a_right_sketch_loses_the_heaviest_keys():
    """The baseline must look like one: of 64 keys of leverage near 1 most score under a half."""
    keys = torch.cat([torch.randn(2000, 64, generator=seeded()), 1000 * torch.eye(64)])
    exact, mixed = leverage_by_svd(keys, 1e-6), RightSketch(8)(keys)
    assert float(exact[-64:].min()) > 0.99
    assert int((mixed[-64:] < 0.5).sum()) >= 48
    assert float((mixed - exact).max()) < 1e-9
    assert not RightSketch.certified


def test_tensor_sketch_is_unbiased_with_the_stated_variance():
    x, y = (torch.nn.functional.normalize(torch.randn(5, 6, generator=seeded(s), dtype=torch.float64)) for s in (1, 2))
    for k in (2, 3):
        sketch = TensorSketch(256, k)
        maps = [sketch.operator(6, seeded(seed)) for seed in range(300)]
        draws = torch.stack([once(x) @ once(y).mT for once in maps])
        assert float(((draws.mean(0) - (x @ y.mT) ** k) * math.sqrt(300) / draws.std(0)).abs().max()) < 4.5
        assert float(draws.var(0).max()) < sketch.variance


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gaussian(0), "m: expected an integer >= 1, got 0"),
        (lambda: OSNAP(10, 3), "s: expected a divisor of m = 10, got 3"),
        (lambda: TensorSketch(8, 1), "k: expected an integer >= 2, got 1"),
        (lambda: SRHT(9).operator(5, seeded()), "padded to 8 rows"),
        (lambda: Gaussian(4).operator(5, seeded()) @ torch.ones(6, 2), "expected 5 rows, got 6"),
        (lambda: SketchedLeverage(Gaussian(4), 0.0), "delta: expected a finite number > 0"),
        (lambda: SketchedLeverage(Gaussian(4), 1.0, 1.0), "failure: expected a probability"),
        (lambda: SketchedLeverage(Gaussian(4), 0.5).decide(torch.eye(4), 0.1), "raise delta or m"),
        (lambda: SketchedLeverage(CountSketch(99), 9.0).decide(torch.eye(4), 0.1), "CountSketch needs m >="),
        (
            lambda: SketchedLeverage(Gaussian(64), 2.0)(torch.full((3, 2), math.nan)),
            "keys: row 0 holds nan; every entry must be finite",
        ),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
