"""The planted model: generator, checker and recovery against brute force."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import levattention as la
from levattention.planted import JL, Recovery, check, generate, near_orthogonal, queries, recover
from oracles import leverage_by_svd


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def measured_by_hand(keys, standout):
    """δ1, δ2 from the whole of KKᵀ in NumPy."""
    K = keys.double().numpy()
    A, squares = np.abs(K @ K.T), np.square(K).sum(-1)
    smaller = np.minimum.outer(squares, squares)
    ratio = np.divide(A, smaller, out=np.zeros_like(A), where=A > 0)
    np.fill_diagonal(ratio, 0)
    inside = np.zeros(len(K), dtype=bool)
    inside[standout.numpy()] = True
    pairs, mixed = ratio[np.ix_(inside, inside)], ratio[np.ix_(inside, ~inside)]
    return pairs.max(initial=0.0), mixed.max(initial=0.0)


def self_attention_by_hand(keys):
    """A_ii²/Σ_j A_ij² from the whole of KKᵀ; 0 for zero keys."""
    K = keys.double().numpy()
    A = K @ K.T
    total = np.square(A).sum(-1)
    return np.divide(np.square(np.diag(A)), total, out=np.zeros(len(K)), where=total > 0)


def relevant_by_scan(keys, vectors, delta1):
    """All keys with ⟨q, k⟩ ≥ 2δ1‖k‖², by looking at every key."""
    K = keys.double()
    squares = K.square().sum(-1)
    passing = (vectors @ K.mT >= 2 * delta1 * squares) & (squares > 0)
    return [row.nonzero().squeeze(-1) for row in passing]


# n, d, k, |S|, ε1, noise within V, rotated, dtype, scale of all keys
NEAR = [
    (n, d, k, size, eps1, noise, rotate, dtype, scale)
    for (n, d, k, size), (eps1, noise), (rotate, dtype, scale) in [
        ((400, 32, 8, 8), (1e-5, 0.02), (False, torch.float64, 1.0)),
        ((400, 32, 8, 8), (1e-6, 0.02), (True, torch.float32, 1e6)),
        ((400, 32, 8, 4), (1e-5, 0.05), (True, torch.float32, 1e-6)),
        ((1000, 64, 16, 16), (1e-5, 0.02), (False, torch.float32, 1.0)),
        ((1000, 64, 16, 16), (1e-4, 0.05), (True, torch.float32, 1.0)),
        ((1000, 64, 16, 12), (1e-4, 0.1), (True, torch.float64, 1.0)),
        ((1000, 64, 16, 2), (1e-5, 0.1), (False, torch.float32, 1.0)),
        ((3000, 64, 16, 16), (1e-5, 0.02), (True, torch.bfloat16, 1.0)),
        ((3000, 64, 16, 16), (1e-3, 0.2), (True, torch.float32, 1.0)),
        ((3000, 128, 32, 32), (1e-5, 0.02), (False, torch.float16, 1.0)),
        ((3000, 128, 32, 32), (1e-5, 0.02), (True, torch.float32, 1e3)),
        ((3000, 128, 32, 20), (1e-4, 0.1), (True, torch.float32, 1e-3)),
        ((8000, 96, 24, 24), (1e-5, 0.02), (True, torch.float32, 1.0)),
        ((8000, 96, 16, 16), (1e-6, 0.01), (False, torch.float32, 1.0)),
        ((8000, 256, 64, 64), (1e-5, 0.02), (True, torch.float32, 1.0)),
        ((300, 512, 64, 40), (1e-5, 0.02), (True, torch.float64, 1.0)),
        ((20000, 32, 8, 8), (1e-6, 0.02), (True, torch.float32, 1.0)),
        ((20000, 48, 12, 12), (1e-5, 0.05), (True, torch.float32, 1.0)),
    ]
]
# n, d, k, |S|, ε1, rotated
BLOCK = [
    (800, 512, 128, 4, 1e-4, False),
    (1500, 768, 192, 6, 1e-4, True),
    (1500, 1024, 256, 12, 1e-5, False),
    (2000, 1024, 256, 8, 1e-3, True),
    (2500, 1024, 256, 16, 1e-4, True),
    (600, 1280, 320, 20, 1e-4, False),
]
SETTINGS = [("near", *s) for s in NEAR] + [("block", *s) for s in BLOCK]
QUERIES = 50


def build(setting, seed):
    if setting[0] == "block":
        _, n, d, k, size, eps1, rotate = setting
        return generate(n, d, k, size / n, eps1, seeded(seed), rotate=rotate)
    _, n, d, k, size, eps1, noise, rotate, dtype, scale = setting
    model = near_orthogonal(n, d, k, size / n, eps1, seeded(seed), noise=noise, rotate=rotate, dtype=dtype)
    return replace(model, keys=model.keys * scale)


def test_the_sweep_is_large_enough():
    assert len(SETTINGS) >= 20
    assert len(SETTINGS) * QUERIES >= 1000


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_every_relevant_key_is_found_and_no_other(number):
    model = build(SETTINGS[number], seed=number)
    found = model.assumptions
    assert found.holds, found.problems
    made = model.random_queries(QUERIES, seeded(number))
    exact = recover(model.keys, delta1=found.delta1, rho=found.rho)
    # A stand-out key is lost with probability at most 1e-9 here: over the sweep, under 3e-8.
    sketched = recover(
        model.keys, delta1=found.delta1, rho=found.rho, sketch=JL(failure=1e-9), generator=seeded(number)
    )
    scanned = relevant_by_scan(model.keys, made.vectors, found.delta1)
    for recovery in (exact, sketched):
        assert torch.isin(model.standout, recovery.candidates).all()
        assert torch.isin(recovery.candidates, recovery.universal.index[recovery.universal.valid]).all()
        assert recovery.consistent(made.vectors).all()
        answers = recovery.relevant_keys(made.vectors)
        assert len(answers) == QUERIES
        for answer, truth, scan in zip(answers, made.relevant, scanned, strict=True):
            assert answer.tolist() == truth.tolist() == scan.tolist()


def test_sweep_covers_many_relevant_keys_and_one():
    most = [build(SETTINGS[i], i).assumptions.max_relevant for i in (3, 18)]
    assert most[0] >= 8
    assert most[1] == 1


@pytest.mark.parametrize("number", [0, 4, 7, 15, 19])
def test_check_against_the_whole_product(number, monkeypatch):
    model = build(SETTINGS[number], seed=99)
    delta1, delta2 = measured_by_hand(model.keys, model.standout)
    for tile, columns in ((1 << 18, 1024), (1000, 3)):
        monkeypatch.setattr("levattention.planted.assumptions.CPU_TILE", tile)
        monkeypatch.setattr("levattention.planted.assumptions.COLUMNS", columns)
        found = check(model.keys, model.standout)
        assert found.delta1 == pytest.approx(delta1, rel=1e-9)
        assert found.delta2 == pytest.approx(delta2, rel=1e-9)
    assert found.rho == pytest.approx(1 / (1 + delta1**2 * len(model.standout) + delta2**2 * len(model.keys)))
    assert found.max_relevant == math.floor(1 / (4 * delta1))


def test_check_with_zero_duplicate_and_uneven_keys():
    keys = torch.tensor([[1.0, 0.2, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.1, 5.0], [0.0, 0.1, 5.0]])
    standout = torch.tensor([1, 0])
    found = check(keys, standout)
    # 0.6 within S against min(1.04, 9); 0.02 and 0.3 against S from outside, the smaller key is in S.
    assert found.delta1 == pytest.approx(0.6 / 1.04)
    assert found.delta2 == pytest.approx(0.3 / 9)
    assert not found.holds
    assert "more than 1/4" in found.problems[0]
    assert found.max_relevant == 0
    both = check(keys, torch.tensor([3, 4]))
    assert both.delta1 == pytest.approx(1.0)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave back."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_check_never_holds_the_whole_product():
    """5,000 keys that all stand out: nothing near 25 million entries, and no more for twice the keys."""
    largest = []
    for n in (5_000, 10_000):
        keys = torch.randn(n, 4, generator=seeded())
        with Largest() as seen:
            check(keys, torch.arange(n))
        largest.append(seen.numel)
    assert largest[0] == largest[1] <= 1 << 18


def test_exactly_orthogonal_keys():
    found = check(torch.eye(5), torch.arange(3))
    assert (found.delta1, found.delta2, found.rho, found.holds, found.max_relevant) == (0.0, 0.0, 1.0, True, 3)


def test_a_quarter_is_allowed_and_more_is_not():
    # Two unit keys at cosine c, and one orthogonal to both.
    def keys(c):
        return torch.tensor([[1.0, 0.0, 0.0], [c, math.sqrt(1 - c * c), 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)

    assert check(keys(0.25), torch.tensor([0, 1])).holds
    assert check(keys(0.25), torch.tensor([0, 1])).max_relevant == 1
    broken = check(keys(0.26), torch.tensor([0, 1]))
    assert not broken.holds
    assert broken.max_relevant == 0


def test_relaxed_takes_delta2_for_both():
    model = near_orthogonal(1000, 64, 16, 0.016, 1e-3, seeded(), noise=0.0)
    found = model.assumptions
    assert found.delta2 > found.delta1
    assert not found.holds
    assert "δ2" in found.problems[0]
    with pytest.raises(ValueError, match="assumptions do not hold: δ2"):
        model.random_queries(3, seeded())
    wider = found.relaxed
    assert wider.holds
    made = model.queries([[p] for p in model.standout.tolist()], delta1=wider.delta1, generator=seeded())
    answers = recover(model.keys, delta1=wider.delta1, rho=wider.rho).relevant_keys(made.vectors)
    assert [a.tolist() for a in answers] == [r.tolist() for r in made.relevant]
    with pytest.raises(ValueError, match="at least the measured"):
        model.queries([[]], delta1=found.delta1 / 2)


@pytest.mark.parametrize("rotate", [False, True])
def test_block_gaussian_variances(rotate):
    n, d, k, eps1 = 6000, 80, 20, 0.04
    model = generate(n, d, k, 0.5, eps1, seeded(3), rotate=rotate, dtype=torch.float64)
    size = len(model.standout)
    assert size == 3000
    torch.testing.assert_close(model.subspace @ model.subspace.mT, torch.eye(k, dtype=torch.float64))
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[model.standout] = True
    inside = (model.keys @ model.subspace.mT).square().sum(-1)
    outside = model.keys.square().sum(-1) - inside
    expected = {(True, "in"): 1.0, (True, "out"): eps1, (False, "in"): eps1, (False, "out"): 1.0}
    for who in (True, False):
        for side, energy, dims in (("in", inside, k), ("out", outside, d - k)):
            mean = expected[who, side]
            # Energy/mean is χ²_dims/dims; six standard errors of its mean over 3000 rows: probability 8e-9 in all.
            assert energy[chosen == who].mean().item() == pytest.approx(mean, rel=6 * math.sqrt(2 / dims / size))
    if rotate:
        # In no coordinate may a basis vector of V be more than 0.8: entries of a random unit vector in 80 dimensions
        # pass that with probability < 1e-15 (beta tail), and there are 1600.
        assert model.subspace.abs().max() < 0.8
    else:
        assert model.subspace.equal(torch.eye(d, dtype=torch.float64)[:k])


def test_a_seed_gives_the_same_keys_and_the_places_are_random():
    one, two, other = (generate(500, 32, 8, 0.02, 1e-3, seeded(s), rotate=True) for s in (1, 1, 2))
    assert one.keys.equal(two.keys)
    assert one.standout.equal(two.standout)
    assert not one.standout.equal(other.standout)
    assert one.standout.tolist() != list(range(10))


def test_share_of_stand_out_keys_survives_rounding():
    assert len(generate(100, 16, 4, 0.29, 0.0, seeded()).standout) == 29


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 17}, r"k: expected k ≤ d/4 = 16, got 17"),
        ({"eps0": 0.0009}, r"eps0: expected ε0·n ≥ 1, got 0.0009 · 1000 = 0.9: no key would stand out"),
        ({"eps0": 0.0}, r"eps0: expected a share"),
        ({"eps0": 1.5}, r"eps0: expected a share"),
        ({"eps1": -1.0}, r"eps1: expected a finite"),
        ({"eps1": math.nan}, r"eps1: expected a finite"),
        ({"n": 0}, r"n: expected a positive integer"),
        ({"dtype": torch.int64}, r"dtype: expected"),
    ],
)
@pytest.mark.parametrize("make", [generate, near_orthogonal])
def test_impossible_settings(make, change, message):
    setting = {"n": 1000, "d": 64, "k": 16, "eps0": 0.01, "eps1": 1e-4, "generator": seeded()} | change
    with pytest.raises(ValueError, match=message):
        make(**setting)


def test_more_orthonormal_keys_than_dimensions():
    with pytest.raises(ValueError, match="V holds no more orthonormal keys than k"):
        near_orthogonal(1000, 64, 16, 0.017, 1e-4, seeded())
    with pytest.raises(ValueError, match="noise: expected a length"):
        near_orthogonal(1000, 64, 16, 0.01, 1e-4, seeded(), noise=-0.1)


@pytest.fixture
def model():
    return near_orthogonal(1000, 64, 16, 0.016, 1e-5, seeded(), rotate=True)


def test_queries_keep_their_bounds(model):
    made = model.random_queries(200, seeded(5))
    delta1 = model.assumptions.delta1
    K = model.keys.double()
    squares = K.square().sum(-1)
    sizes = set()
    for row in range(200):
        w, z = made.weights[row], made.noise[row]
        sizes.add(len(w))
        assert w.min() >= 4 * delta1 * (1 - 1e-12)
        assert w.sum() <= 1 + 1e-12
        share = ((K @ z).abs() / squares).max().item() / (delta1 / 4)
        assert share == pytest.approx(1.0, rel=1e-9)
        torch.testing.assert_close(made.vectors[row], w @ K[made.relevant[row]] + z)
    assert sizes == set(range(1, min(16, model.assumptions.max_relevant) + 1))


def test_chosen_weights_follow_their_keys(model):
    last, first = model.standout[5].item(), model.standout[2].item()
    made = model.queries([[last, first]], weights=[[0.6, 0.3]], noise=0.0)
    torch.testing.assert_close(made.vectors[0], (0.6 * model.keys[last].double() + 0.3 * model.keys[first].double()))
    assert made.relevant[0].tolist() == [first, last]
    assert made.weights[0].tolist() == [0.3, 0.6]


def test_queries_out_of_bounds(model):
    found, S = model.assumptions, model.standout
    few = S[:2]
    outside = next(i for i in range(1000) if i not in S.tolist())
    cases = [
        ({"relevant": [[outside]]}, "not in the stand-out set"),
        ({"relevant": [[int(S[0]), int(S[0])]]}, "each position once"),
        ({"relevant": [[2000]]}, "expected positions in"),
        ({"relevant": [few], "weights": [[0.5, found.delta1]]}, "expected each ≥ 4δ1"),
        ({"relevant": [few], "weights": [[0.7, 0.7]]}, "sum of at most 1, got 1.4"),
        ({"relevant": [few], "weights": [[0.7]]}, "expected 2 numbers"),
        ({"relevant": [few], "weights": []}, "one list for each"),
        ({"relevant": [few], "noise": 1.5}, "share of the allowed noise"),
        ({"relevant": [few], "noise": torch.ones(1, 64)}, r"noise: expected \|⟨z, k⟩\|"),
        ({"relevant": [few], "noise": torch.ones(2, 64)}, "noise: expected shape"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            model.queries(**change)
    allowed = model.queries([few], generator=seeded()).noise
    assert model.queries([few], noise=allowed, generator=seeded()).noise.equal(allowed)
    with pytest.raises(ValueError, match="noise"):
        model.queries([few], noise=allowed * 1.001)


def test_too_many_relevant_keys(model):
    with pytest.raises(ValueError, match=r"16 keys in one query need weights ≥ 4δ1 = 0.4 each, which sum to 6.4 > 1"):
        queries(model.keys, model.standout, [model.standout], delta1=0.1)
    with pytest.raises(ValueError, match=r"δ1 = 0\.1 allows at most 2"):
        queries(model.keys, model.standout, [model.standout[:3]], delta1=0.1)
    assert len(queries(model.keys, model.standout, [model.standout[:2]], delta1=0.125, noise=0.0)) == 1


def test_a_query_of_noise_alone_has_no_relevant_key(model):
    found = model.assumptions
    made = model.queries([[]], generator=seeded())
    assert recover(model.keys, delta1=found.delta1, rho=found.rho).relevant_keys(made.vectors[0]).tolist() == []


def test_candidates_against_the_whole_product():
    # ε1 large enough that U′ is more than S and less than U.
    model = near_orthogonal(1200, 32, 8, 8 / 1200, 2e-2, seeded(4), noise=0.2, rotate=True)
    keys = model.keys.clone()
    keys[7] = 0.0
    keys[8] = keys[9]
    rho = 0.05
    found = recover(keys, delta1=0.1, rho=rho)
    assert found.candidates.tolist() == np.flatnonzero(self_attention_by_hand(keys) >= rho).tolist()
    assert found.universal.mask(1200).tolist() == (leverage_by_svd(keys, 1e-14) >= rho).tolist()
    by_hand = self_attention_by_hand(keys)[found.candidates.numpy()]
    np.testing.assert_allclose(found.self_scores.numpy(), by_hand, rtol=1e-9)
    whole = recover(keys, delta1=0.1, rho=1e-6)
    assert len(whole.candidates) == 1199


@pytest.mark.parametrize("tiny", [1e-3, 1e-5, 1e-7])
def test_stand_out_keys_that_are_tiny_beside_the_rest(tiny):
    """Only S has its directions, at 1e-7 of the length of other keys: K has κ ≈ 1e8 and G would have lost it."""
    model = near_orthogonal(500, 32, 8, 8 / 500, 0.0, seeded(6), dtype=torch.float64)
    keys = model.keys.clone()
    keys[model.standout] *= tiny
    found = check(keys, model.standout)
    assert found.holds
    recovery = recover(keys, delta1=found.delta1, rho=found.rho)
    assert recovery.candidates.equal(model.standout)
    np.testing.assert_allclose(
        recovery.self_scores.numpy(), self_attention_by_hand(keys)[model.standout.numpy()], rtol=1e-6
    )
    made = queries(keys, model.standout, [model.standout[:3]], delta1=found.delta1, generator=seeded())
    assert recovery.relevant_keys(made.vectors[0]).equal(model.standout[:3])


def test_sketch_estimates_and_its_failure_probability():
    """The estimate is the truth times χ²ₘ/m, and a stand-out key is lost no more often than promised."""
    model = near_orthogonal(300, 32, 8, 8 / 300, 1e-5, seeded(), rotate=True)
    found = model.assumptions
    exact = recover(model.keys, delta1=found.delta1, rho=1e-3)
    ratios = []
    for seed in range(200):
        noisy = recover(
            model.keys, delta1=found.delta1, rho=1e-9, sketch=JL(distortion=0.9, failure=0.5), generator=seeded(seed)
        )
        assert noisy.columns == JL(0.9, 0.5).columns(int(noisy.universal.size.item()))
        at = torch.isin(noisy.candidates, exact.candidates[:1])
        ratios.append((exact.self_scores[0] / noisy.self_scores[at][0]).item() * noisy.columns)
    from scipy import stats

    # A correct sampler fails this at 1e-6.
    assert stats.kstest(ratios, stats.chi2(noisy.columns).cdf).pvalue > 1e-6


def test_sketch_loses_no_more_than_it_says():
    """Keys exactly at the threshold: each run may lose one with probability ≤ 0.2."""
    failure, runs = 0.2, 150
    # Orthonormal keys repeated: every self-score is 1/4, and so is every leverage.
    keys = torch.eye(8).repeat(4, 1)
    lost = sum(
        len(recover(keys, delta1=0.1, rho=0.25, sketch=JL(0.4, failure), generator=seeded(s)).candidates) < 32
        for s in range(runs)
    )
    # P[Binomial(150, 0.2) > 55] < 1e-6.
    assert lost <= 55
    assert len(recover(keys, delta1=0.1, rho=0.25).candidates) == 32


def test_sketch_needs_its_generator_and_sane_settings(model):
    with pytest.raises(ValueError, match="generator"):
        recover(model.keys, delta1=0.1, rho=0.5, sketch=JL())
    for bad in ({"distortion": 0.0}, {"distortion": 1.0}, {"failure": 0.0}):
        with pytest.raises(ValueError, match="expected a number in"):
            JL(**bad)


def test_same_sketch_from_the_same_seed(model):
    a, b = (recover(model.keys, delta1=0.1, rho=1e-4, sketch=JL(), generator=seeded(2)) for _ in range(2))
    assert a.self_scores.equal(b.self_scores)


def test_what_is_kept_does_not_grow_with_n():
    kept = []
    for n in (1000, 20_000):
        model = near_orthogonal(n, 64, 16, 16 / n, 1e-6, seeded())
        found = model.assumptions
        recovery = recover(model.keys, delta1=found.delta1, rho=found.rho)
        kept.append(recovery.rows.shape)
        assert not any(isinstance(value, torch.Tensor) and n in value.shape for value in vars(recovery).values())
    assert kept[0] == kept[1] == (16, 64)


def test_single_and_batched_queries_agree(model):
    found = model.assumptions
    recovery = recover(model.keys, delta1=found.delta1, rho=found.rho)
    made = model.random_queries(7, seeded())
    for vector, answer in zip(made.vectors, recovery.relevant_keys(made.vectors), strict=True):
        assert recovery.relevant_keys(vector).equal(answer)
        assert recovery.relevant_keys(vector.float()).equal(answer)
    assert recovery.relevant_keys(made.vectors[:0]) == []
    assert bool(recovery.consistent(made.vectors[0]))


def test_broken_assumptions_are_told():
    """The block Gaussian at k = 64: the paper's δ1 = 4/k is far from what is there."""
    model = generate(1000, 256, 64, 0.08, 1e-4, seeded())
    found = model.assumptions
    assert found.delta1 > 5 * (4 / 64)
    assert not found.holds
    assert found.max_relevant == 0
    with pytest.raises(ValueError, match="more than 1/4"):
        model.random_queries(5, seeded())
    with pytest.raises(ValueError, match="so no query can have one"):
        recover(model.keys, delta1=found.delta1, rho=found.rho)
    # Trust δ1 = 4/k nevertheless: false keys come out, and the scores between the two bounds give it away.
    trusting = recover(model.keys, delta1=4 / 64, rho=found.rho)
    vectors = model.keys[model.standout].double()
    assert sum(len(answer) > 1 for answer in trusting.relevant_keys(vectors)) > 70
    assert not trusting.consistent(vectors).any()


def test_consistent_sees_each_way_to_break_the_model():
    recovery = recover(torch.eye(6), delta1=0.1, rho=0.9)
    scores = torch.tensor(
        [
            [0.5, 0.1, 0, 0, 0, 0],  # as the model has it
            [0.5, 0.2, 0, 0, 0, 0],  # between the bounds
            [0.5, -0.2, 0, 0, 0, 0],  # under the lower bound
            [0.3, 0.3, 0.3, 0, 0, 0],  # three keys, where 4δ1 = 0.4 allows two
        ]
    )
    assert recovery.consistent(scores).tolist() == [True, False, False, False]


def test_the_printed_threshold_finds_nothing(model):
    """(11/4)‖K‖² without δ1, as the paper's algorithm has it."""
    found = model.assumptions
    made = model.random_queries(100, seeded())
    scores = recover(model.keys, delta1=found.delta1, rho=found.rho).scores(made.vectors)
    assert (scores >= 11 / 4).sum() == 0
    assert (scores >= 11 / 4 * found.delta1 * (1 - 1e-9)).sum() == sum(map(len, made.relevant))


def test_bad_input_is_named(model):
    keys, S = model.keys, model.standout
    recovery = recover(keys, delta1=0.1, rho=0.5)
    assert isinstance(recovery, Recovery)
    spoilt = keys.clone()
    spoilt[3, 5] = math.nan
    zero = keys.clone()
    zero[S[1]] = 0
    cases = [
        (lambda: check(keys[None], S), "one matrix"),
        (lambda: check(spoilt, S), "row 3 holds nan"),
        (lambda: check(keys, S.double()), "expected a list of integer positions"),
        (lambda: check(keys, S > 0), "expected a list of integer positions"),
        (lambda: check(keys, S[:0]), "expected a list of integer positions"),
        (lambda: check(keys, S + 1000), "expected positions in"),
        (lambda: check(keys, S.repeat(2)), "each position once"),
        (lambda: check(zero, S), f"key {int(S[1])} is zero"),
        (lambda: recover(spoilt, delta1=0.1, rho=0.5), "row 3 holds nan"),
        (lambda: recover(keys[None], delta1=0.1, rho=0.5), "one matrix"),
        (lambda: recover(keys, delta1=0.0, rho=0.5), "delta1: expected"),
        (lambda: recover(keys, delta1=math.nan, rho=0.5), "delta1: expected"),
        (lambda: recover(keys, delta1=0.3, rho=0.5), "so no query can have one"),
        (lambda: recover(keys, delta1=0.1, rho=0.0), "rho: expected"),
        (lambda: recover(keys, delta1=0.1, rho=1.5), "rho: expected"),
        (lambda: recovery.relevant_keys(torch.ones(65)), r"expected a floating tensor \(64,\) or \(m, 64\)"),
        (lambda: recovery.relevant_keys(torch.ones(2, 3, 64)), "expected a floating tensor"),
        (lambda: recovery.relevant_keys(torch.ones(64).long()), "expected a floating tensor"),
        (lambda: recovery.relevant_keys(torch.full((64,), math.inf)), "q: row 0 holds inf"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_public_access():
    assert la.planted.generate is generate
    assert {"check", "generate", "near_orthogonal", "queries", "recover"} <= set(la.planted.__all__)
