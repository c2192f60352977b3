"""Normalisers: exact ones against extended precision in the worst directions, the others attacked by ascent."""

import math
import re

import numpy as np
import pytest
import torch

import levattention as la
from levattention.normaliser import Exact, Sampled, Sketched, TensorSketched, default_normaliser, restore
from levattention.normaliser.sampled import draw, sensitivity_bounds
from levattention.sketches import OSNAP, SRHT, CountSketch, Gaussian
from oracles import power_sums
from strategies import conditioned, deficient, heavy_tailed, spikes


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def directions(keys, count=40):
    """Singular directions (the last ones hurt most), the query of each key's leverage, keys and random vectors."""
    right = torch.linalg.svd(keys.double(), full_matrices=False).Vh
    witnesses = la.witness(keys.double(), torch.arange(min(count, len(keys))))
    noise = torch.randn(count, keys.shape[-1], generator=seeded(), dtype=torch.float64)
    return torch.cat([right, witnesses, keys[:count].double(), noise])


def relative_error(normaliser, keys, queries, p):
    exact = power_sums(keys, queries, p)
    live = exact > 0
    return float(np.abs(normaliser(queries.double()).numpy()[live] / exact[live] - 1).max())


@pytest.mark.parametrize("kappa", [1e2, 1e4, 1e6])
def test_p_2_is_exact_to_1e_9_in_the_worst_direction(kappa):
    keys = conditioned(2000, 8, kappa)
    queries = directions(keys)
    assert relative_error(Exact()(keys, la.Power(2)), keys, queries, 2) < 1e-9


def test_the_gram_would_not_have_been_enough():
    """So the test above can fail: at κ = 1e6 qᵀGq is off by far more than 1e-9 in the last direction."""
    keys = conditioned(2000, 8, 1e6)
    queries = directions(keys)
    gram = la.Gram.of(keys).matrix
    by_gram = ((queries @ gram) * queries).sum(-1).numpy()
    assert np.abs(by_gram / power_sums(keys, queries, 2) - 1).max() > 1e-7


HARD = {
    "heavy-tailed": heavy_tailed(900, 4),
    "spikes": spikes(900, 4),
    "zero and duplicate rows": torch.cat([torch.zeros(300, 4), heavy_tailed(200, 4).repeat(3, 1).float()]),
    "bf16": heavy_tailed(900, 4, seed=2).bfloat16(),
    "scale 1e-6": heavy_tailed(900, 4) * 1e-6,
    "scale 1e6": heavy_tailed(900, 4) * 1e6,
    "condition 1e4": conditioned(900, 4, 1e4),
    "fewer keys than columns of the lift": heavy_tailed(6, 4),
    "fewer keys than columns": heavy_tailed(2, 4),
}


@pytest.mark.parametrize("p", [2, 4, 6])
@pytest.mark.parametrize("name", HARD)
def test_even_p_is_exact(name, p):
    keys = HARD[name]
    error = relative_error(Exact()(keys, la.Power(p)), keys, directions(keys), p)
    assert error < (1e-9 if p < 6 else 1e-7), error


@pytest.mark.parametrize("p", [2, 4])
def test_rank_deficient_keys_are_summed_in_their_row_space(p):
    keys = deficient(900, 5, 3)
    queries = torch.randn(50, 5, generator=seeded(), dtype=torch.float64)
    assert relative_error(Exact()(keys, la.Power(p)), keys, queries, p) < 1e-9
    zero = Exact()(torch.zeros(900, 3), la.Power(p))(torch.randn(4, 3, generator=seeded()).double())
    assert torch.equal(zero, torch.zeros(4, dtype=torch.float64))


def test_a_long_row_sends_the_lift_to_qr(monkeypatch):
    """One key of leverage 1 among 20,000 makes the largest eigenvalue of the lifted Gram n times the smallest sum."""
    keys = torch.cat([torch.randn(20_000, 3, generator=seeded(), dtype=torch.float64), torch.tensor([[1e5, 0, 0]])])
    calls = []
    original = la.normaliser.exact.triangle_of_blocks
    monkeypatch.setattr(
        la.normaliser.exact, "triangle_of_blocks", lambda blocks, wide: calls.append(wide) or original(blocks, wide)
    )
    error = relative_error(Exact()(keys, la.Power(4)), keys, directions(keys), 4)
    assert calls == [6]
    assert error < 1e-9


def test_heads_and_sparse_keys_give_what_each_head_gives():
    keys = torch.stack([heavy_tailed(400, 4), deficient(400, 4, 2), spikes(400, 4)]).float()
    queries = torch.randn(3, 7, 4, generator=seeded()).double()
    for loss in (la.Power(2), la.Power(4)):
        together = Exact()(keys, loss)(queries)
        for head, q, z in zip(keys, queries, together, strict=True):
            torch.testing.assert_close(Exact()(head, loss)(q), z, rtol=1e-10, atol=0)
            torch.testing.assert_close(Exact()(head.to_sparse_csr(), loss)(q), z, rtol=1e-10, atol=0)
            torch.testing.assert_close(
                torch.from_numpy(power_sums(head, q, loss.p).astype(float)), z, rtol=1e-9, atol=0
            )


def worst_error(normaliser, keys, loss, seed, steps=40):
    """The largest |Ẑ/Z − 1| that gradient ascent over whitened queries finds, from random starts of many lengths."""
    _, singular, right = torch.linalg.svd(keys, full_matrices=False)
    to_query = right.mT / singular * len(keys) ** 0.5
    starts = torch.randn(24, keys.shape[-1], generator=seeded(seed), dtype=torch.float64)
    towards = torch.linalg.solve(to_query, keys[torch.randperm(len(keys), generator=seeded(seed))[:24]].mT).mT
    pool = torch.cat([starts, torch.nn.functional.normalize(towards)])
    lengths = torch.logspace(-2, 2, len(pool), dtype=torch.float64).unsqueeze(-1)
    queries = (pool * lengths).requires_grad_()
    ascent = torch.optim.Adam([queries], lr=0.05, maximize=True)
    worst = 0.0
    for _ in range(steps):
        q = queries @ to_query.mT
        ratio = normaliser(q) / loss(q @ keys.mT).sum(-1)
        worst = max(worst, float((ratio.detach() - 1).abs().max()))
        ascent.zero_grad()
        ratio.log().abs().sum().backward()
        ascent.step()
    return worst


def allowed(failures, seeds, stated):
    """Whether that many failures have a chance over 1e-4 when each has the stated probability."""
    return sum(math.comb(seeds, j) * stated**j * (1 - stated) ** (seeds - j) for j in range(failures, seeds + 1)) > 1e-4


LOSSES = [la.Power(1), la.Power(1.5), la.Power(2), la.Power(3), la.Power(4), la.Huber(0.7), la.Tukey(1.3)]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_sample_holds_the_worst_query_that_ascent_finds(loss):
    """Stated for each query; measured here for the worst one found, over ten seeds."""
    # Heavy tails are hard for small p; for large p they leave so few light keys that Gaussian keys are the harder ones.
    hard = loss in (la.Power(2), la.Power(3), la.Power(4))
    keys = torch.randn(4000, 3, generator=seeded(), dtype=torch.float64) if hard else heavy_tailed(4000, 3, seed=1)
    delta, failure = 0.4, 0.05
    errors = []
    for seed in range(10):
        fitted = Sampled(delta, failure, seed)(keys, loss)
        errors.append(worst_error(fitted, keys, loss, seed))
    assert fitted.rows.shape[0] < 1500
    assert fitted.guarantee.proved
    assert not fitted.guarantee.every_query
    assert min(errors) > 0.02  # it is a sample, and the search does find its error
    assert allowed(sum(error > delta for error in errors), 10, failure), errors


def test_a_sample_that_is_too_small_is_found_out():
    """The attack has teeth: with a twentieth of the rows that δ asks for, it leaves 1 ± δ."""
    keys = heavy_tailed(4000, 3, seed=1)
    small = Sampled(0.99, 0.9)(keys, la.Power(3))
    assert worst_error(small, keys, la.Power(3), 0) > 0.2


def test_a_sample_is_unbiased_and_keeps_what_must_be_kept():
    chance = torch.cat([torch.tensor([1.0, 0.0, 1.0]), torch.rand(60, generator=seeded(3))]).double()
    values = torch.randn(63, generator=seeded(4)).double().exp()
    draws = []
    for seed in range(2000):
        index, weight = draw(chance, seeded(seed))
        assert index[:2].tolist() == [0, 2]
        assert weight[:2].tolist() == [1.0, 1.0]
        assert 1 not in index
        assert len(index) <= math.ceil(float(chance.sum()))
        draws.append(float((values[index] * weight).sum()))
    kept = float(values[chance > 0].sum())
    assert abs(np.mean(draws) - kept) < 5 * np.std(draws) / 2000**0.5


def test_each_query_stays_within_delta_as_often_as_stated():
    """Bernstein at a failure probability of 0.2: 200 seeds on four fixed queries."""
    keys, loss = heavy_tailed(1500, 3, seed=4), la.Power(1)
    queries = torch.randn(4, 3, generator=seeded(), dtype=torch.float64)
    exact = torch.from_numpy(power_sums(keys, queries, 1).astype(float))
    bounds = sensitivity_bounds(keys, loss)
    rule = Sampled(0.3, 0.2)
    off = []
    for seed in range(200):
        index, weight = draw((rule.multiplier * bounds).clamp(max=1.0), seeded(seed))
        estimate = (loss(queries @ keys[index].mT) * weight).sum(-1)
        off.append((estimate / exact - 1).abs() > 0.3)
    failures = torch.stack(off).sum(0)
    assert all(allowed(int(count), 200, 0.2) for count in failures)


@pytest.mark.parametrize(
    ("sketch", "failure"),
    [(Gaussian(1024), 1e-3), (SRHT(1024), 1e-3), (OSNAP(2048, 8), 1e-3), (CountSketch(2560), 0.1)],
)
@pytest.mark.parametrize("keys", [spikes(3000, 8), conditioned(3000, 8, 1e6)], ids=["spikes", "condition 1e6"])
def test_a_sketch_holds_the_worst_query_of_all(sketch, failure, keys):
    """The extreme eigenvalues of the whitened R̂ᵀR̂ are the worst queries: no search could find worse ones."""
    white = la.scorers.leverage.factor_keys(keys, "exact")[0].whitener
    failures, seeds = 0, 12
    for seed in range(seeds):
        fitted = Sketched(sketch, 0.5, failure, seed)(keys, la.Power(2))
        values = torch.linalg.svdvals(fitted.rows @ white).square()
        failures += bool(((values - 1).abs() > 0.5).any())
    assert fitted.guarantee.proved == isinstance(sketch, Gaussian | CountSketch)
    assert allowed(failures, seeds, failure)


def test_tensor_sketch_is_unbiased_and_within_delta():
    keys, loss = torch.randn(6000, 8, generator=seeded(), dtype=torch.float64), la.Power(6)
    keys[:3] *= 30
    queries = torch.cat(
        [torch.randn(20, 8, generator=seeded(1), dtype=torch.float64), la.witness(keys, torch.arange(6))]
    )
    exact = power_sums(keys, queries, 6).astype(float)
    fits = [TensorSketched(256, 0.4, 0.2, seed)(keys, loss) for seed in range(12)]
    ratios = np.stack([fitted(queries).numpy() / exact for fitted in fits])
    assert (np.abs(ratios - 1) > 0.4).mean() < 0.2
    assert np.all(np.abs(ratios.mean(0) - 1) < 5 * ratios.std(0) / 12**0.5 + 1e-9)
    assert ratios.std() > 1e-4
    assert not fits[0].guarantee.proved
    assert "probes" in fits[0].guarantee.how
    # The same seed is the same sketch, and one that is far too small is refused.
    assert torch.equal(TensorSketched(256, 0.4, 0.2, 3)(keys, loss)(queries), fits[3](queries))
    with pytest.raises(ValueError, match=r"TensorSketch with m = 8 is off by more than 0.1"):
        TensorSketched(8, 0.1, 0.05)(keys, loss)


def test_tensor_sketch_with_enough_columns_is_proved():
    keys = torch.randn(6000, 2, generator=seeded(), dtype=torch.float64)
    fitted = TensorSketched(1024, 0.9, 0.5)(keys, la.Power(4))
    assert fitted.guarantee.proved
    queries = torch.randn(50, 2, generator=seeded(1), dtype=torch.float64)
    assert relative_error(fitted, keys, queries, 4) < 0.9


def test_the_default_is_exact_where_it_fits_and_a_sample_elsewhere():
    keys = torch.zeros(50_000, 64)
    assert default_normaliser(keys, la.Power(2)) == Exact()
    assert default_normaliser(keys[:, :8], la.Power(4)) == Exact()
    assert default_normaliser(keys[:300], la.Power(6)) == Exact()
    for loss in (la.Power(6), la.Power(3), la.Huber(), la.Tukey()):
        assert default_normaliser(keys, loss) == Sampled()


def test_guarantees_read_as_sentences_and_survive_a_round_trip():
    keys = heavy_tailed(3000, 3)
    queries = torch.randn(5, 3, generator=seeded(), dtype=torch.float64)
    for factory, loss, words in [
        (Exact(), la.Power(2), "exact up to rounding, for every query"),
        (Exact(), la.Power(4), "whitened symmetric lift"),
        (Sampled(0.4, 0.1), la.Tukey(2.0), "within 1 ± 0.4 for each query with probability at least 1 − 0.1, proved"),
        (Sketched(SRHT(1024)), la.Power(2), "for all queries at once with probability at least 1 − 0.001, measured"),
        (TensorSketched(128, 0.9, 0.5), la.Power(4), "TensorSketch, m = 128"),
    ]:
        fitted = factory(keys, loss)
        assert words in str(fitted.guarantee)
        again = restore(*fitted.state())
        assert again.guarantee == fitted.guarantee
        assert torch.equal(again(queries), fitted(queries))


def test_a_sample_of_everything_says_that_it_is_exact():
    keys = torch.randn(40, 4, generator=seeded(1), dtype=torch.float64)
    fitted = Sampled(0.1)(keys, la.Power(3))
    queries = torch.randn(5, 4, generator=seeded(), dtype=torch.float64)
    assert fitted.guarantee.delta == 0
    assert relative_error(fitted, keys, queries, 3) < 1e-12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda k: Exact()(k, la.Power(3)), "Exact is for even powers, got loss=Power(p=3)"),
        (lambda k: Exact()(k, la.Huber()), "Exact is for even powers"),
        (lambda k: Exact()(torch.randn(20_000, 16), la.Power(60)), "columns"),
        (lambda k: Sampled(0.0), "delta: expected a number in (0, 1), got 0.0"),
        (lambda k: Sampled(0.1, 1.5), "failure: expected a number in (0, 1), got 1.5"),
        (lambda k: Sampled()(k, la.Softmax(1.0)), "a sample is drawn for Power, Huber and Tukey"),
        (lambda k: Sketched(Gaussian(512))(k, la.Power(4)), "Sketched is for f(x) = x²"),
        (lambda k: Sketched(Gaussian(16), 0.5)(k, la.Power(2)), "by proof m = 1,024"),
        (lambda k: Sketched(OSNAP(256, 8), 0.5)(k, la.Power(2)), "by measurements that takes about m = 1,024"),
        (lambda k: Sketched(CountSketch(63), 0.5, 0.5)(k, la.Power(2)), "m >= d²/(δ²·failure) = 72 rows"),
        (lambda k: TensorSketched()(k, la.Power(2)), "TensorSketched is for even p above 2"),
        (lambda k: TensorSketched(1 << 20), "m: 1,048,576 columns take"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(heavy_tailed(300, 3))
