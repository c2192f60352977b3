"""HeavyIndex: the set and the weights against brute force on adversarial queries; files, shapes and bad input."""

import json
import math
import re
import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import levattention as la
from levattention import normaliser
from levattention.features import TensorPower
from levattention.scorers import SketchedLeverage
from levattention.sketches import SRHT, Gaussian
from oracles import attention, power_sums
from strategies import conditioned, deficient, heavy_tailed, spikes


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def tangled(n, d, kappa, seed=0):
    """Heavy keys among many light ones, under a map of condition number κ."""
    return heavy_tailed(n, d, seed) @ conditioned(d, d, kappa, seed)


def adversarial(keys, loss, eps, count=12):
    """Queries that make single keys as heavy as they get, queries at which a key's weight is ε to 1e-6, and others."""
    chosen = la.universal_set(keys, k=count).index
    towards = la.witness(keys.double(), chosen)
    found = la.adversary.attack(keys, torch.arange(len(keys)), loss=loss, steps=30, generator=seeded())
    away = torch.randn(count, keys.shape[-1], generator=seeded(1), dtype=torch.float64)
    away = away / away.norm(dim=-1, keepdim=True) * towards.norm(dim=-1, keepdim=True) * 30
    near = [found.query.unsqueeze(0)]
    for j, start, end in zip(chosen.tolist(), towards, away, strict=True):
        weight = lambda t, j=j, a=start, b=end: float(attention(keys, (a + t * (b - a)).unsqueeze(0), loss)[0, j])  # noqa: E731
        low, high = 0.0, 1.0
        if not weight(low) > eps > weight(high):
            continue
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if weight(middle) > eps else (low, middle)
        near += [(start + t * (end - start)).unsqueeze(0) for t in (low - 1e-6, low, high, high + 1e-6)]
    singular = torch.linalg.svd(keys.double(), full_matrices=False).Vh
    return torch.cat([towards, *near, singular, away, keys[:count].double()])


def check(index, keys, queries, loss, eps, tolerance):
    """{j : A ≥ ε} comes back but for weights within 1e-8 of ε, and every weight is right to the tolerance."""
    hits = index(queries)
    weights = attention(keys, queries, loss)
    delta = index.normaliser.guarantee.delta
    lowest = eps * (1 - delta) / (1 + delta)
    returned = torch.zeros_like(weights, dtype=torch.bool)
    rows = torch.arange(len(queries)).unsqueeze(-1).expand(hits.index.shape)
    returned[rows[hits.valid], hits.index[hits.valid]] = True
    assert not (~returned & (weights >= eps + 1e-8)).any()
    assert not (returned & (weights < lowest - 1e-8)).any()
    true = weights.gather(-1, hits.index)[hits.valid]
    got = hits.weight[hits.valid]
    assert ((got / true - 1).abs() <= tolerance).all(), float((got / true - 1).abs().max())
    assert (hits.weight.diff(dim=-1) <= 0).all()
    assert (hits.weight.sum(-1) <= 1 + 1e-12).all()
    return int(hits.valid.sum())


EXACT = [
    *((la.Power(2), tangled(2000, 6, kappa), 0.05) for kappa in (1e2, 1e4, 1e6)),
    *((la.Power(4), tangled(2000, 6, kappa), 0.05) for kappa in (1e1, 1e4)),
    (la.Power(6), tangled(1000, 3, 1e2), 0.1),
    (la.Power(2), spikes(2000, 6), 0.02),
    (la.Power(4), torch.cat([torch.zeros(500, 4), heavy_tailed(200, 4).repeat(3, 1)]), 0.05),
    (la.Power(4), heavy_tailed(50, 5), 0.1),
    (la.Power(2), heavy_tailed(2000, 6, 3) * 1e6, 0.05),
    (la.Power(4), heavy_tailed(2000, 6, 3) * 1e-6, 0.05),
    (la.Power(2), heavy_tailed(2000, 6, 3).bfloat16(), 0.05),
]


@pytest.mark.parametrize("case", range(len(EXACT)))
def test_exact_answers_are_those_of_brute_force(case):
    loss, keys, eps = EXACT[case]
    index = la.HeavyIndex(keys, eps, loss)
    assert index.normaliser.guarantee.delta == 0
    assert check(index, keys, adversarial(keys, loss, eps), loss, eps, 1e-9) > 20


ROUGH = [
    (la.Power(1), normaliser.Sampled(0.3, 1e-2)),
    (la.Power(3), normaliser.Sampled(0.3, 1e-2)),
    (la.Power(4), normaliser.Sampled(0.3, 1e-2)),
    (la.Huber(0.5), normaliser.Sampled(0.3, 1e-2)),
    (la.Tukey(2.0), normaliser.Sampled(0.3, 1e-2)),
    (la.Power(2), normaliser.Sketched(Gaussian(2048), 0.3, 1e-2)),
    (la.Power(2), normaliser.Sketched(SRHT(2048), 0.3, 1e-2)),
    (la.Power(6), normaliser.TensorSketched(512, 0.5, 0.2)),
]


@pytest.mark.parametrize("case", range(len(ROUGH)))
def test_rough_normalisers_lose_no_heavy_key(case):
    """One seed of each: with a sample the attack's queries are not those of its guarantee, but of its measurements."""
    loss, factory = ROUGH[case]
    keys = torch.cat([heavy_tailed(4000, 4, seed=6), 2e4 * torch.eye(4, dtype=torch.float64)])
    index = la.HeavyIndex(keys, 0.1, loss, factory)
    delta = index.normaliser.guarantee.delta
    assert 0 < delta < 1
    queries = adversarial(keys, la.Power(2) if isinstance(loss, la.Huber | la.Tukey) else loss, 0.1)
    assert check(index, keys, queries, loss, 0.1, delta / (1 - delta)) > 10


def test_ties_at_eps_all_fit():
    keys = torch.eye(5, dtype=torch.float64).repeat(4, 1)
    hits = la.HeavyIndex(keys, 0.25)(torch.eye(5, dtype=torch.float64))
    assert hits.valid.all()
    assert [sorted(row) for row in hits.index.tolist()] == [[j, j + 5, j + 10, j + 15] for j in range(5)]
    assert torch.equal(hits.weight, torch.full((5, 4), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("loss", [la.Power(2), la.Power(4), la.Power(3)])
def test_heads_are_batch(loss):
    keys = torch.stack([heavy_tailed(500, 4), spikes(500, 4), deficient(500, 4, 2), torch.zeros(500, 4)]).float()
    keys = keys.reshape(2, 2, 500, 4)
    queries = torch.randn(2, 2, 9, 4, generator=seeded())
    factory = normaliser.Sampled(0.2, 0.01) if loss.p == 3 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hits = la.HeavyIndex(keys, 0.1, loss, factory)(queries)
        assert hits.index.shape[:-1] == (2, 2, 9)
        assert hits.undefined[1, 1].all()
        assert not hits.undefined[0].any()
        for a, b in np.ndindex(2, 2):
            index = la.HeavyIndex(keys[a, b], 0.1, loss, factory)
            alone = index(queries[a, b])
            for i in range(9):
                # The sample of a head alone is another one than that of the same head among others.
                if index.normaliser.guarantee.delta == 0:
                    here, there = hits.valid[a, b, i], alone.valid[i]
                    assert hits.index[a, b, i][here].tolist() == alone.index[i][there].tolist()
                    weights = hits.weight[a, b, i][here], alone.weight[i][there]
                    torch.testing.assert_close(*weights, rtol=1e-10, atol=0)


def test_maps_of_the_generalised_problem():
    """f(⟨ψ(q), φ(k)⟩) with f = x² and the second tensor power is |⟨q, k⟩|⁴; other maps need not agree."""
    keys = heavy_tailed(800, 3)
    queries = torch.randn(30, 3, generator=seeded(), dtype=torch.float64)
    lift = TensorPower(2)
    mapped = la.HeavyIndex(keys, 0.1, key_map=lift, query_map=lift)(queries)
    plain = la.HeavyIndex(keys, 0.1, la.Power(4))(queries)
    assert mapped.index[mapped.valid].tolist() == plain.index[plain.valid].tolist()
    torch.testing.assert_close(mapped.weight[mapped.valid], plain.weight[plain.valid], rtol=1e-9, atol=0)
    wave = lambda x: torch.cos(x.double())  # noqa: E731
    index = la.HeavyIndex(keys, 0.02, key_map=wave, query_map=lambda q: q.double() ** 3)
    hits = index(queries)
    true = attention(wave(keys), queries**3, la.Power(2))
    assert torch.equal(hits.valid.sum(-1), (true >= 0.02).sum(-1))
    torch.testing.assert_close(hits.weight[hits.valid], true.gather(-1, hits.index)[hits.valid], rtol=1e-9, atol=0)


def test_queries_are_worked_off_in_blocks(monkeypatch):
    keys = heavy_tailed(1000, 4)
    queries = torch.randn(500, 4, generator=seeded(), dtype=torch.float64)
    index = la.HeavyIndex(keys, 0.1, la.Power(4))
    whole = index(queries)
    monkeypatch.setattr(la.heavy, "CPU_TILE", 300)
    blocks = []
    original = type(index)._answer
    monkeypatch.setattr(type(index), "_answer", lambda self, q: blocks.append(len(q)) or original(self, q))
    parts = index(queries)
    assert len(blocks) > 10
    assert torch.equal(whole.index, parts.index)
    torch.testing.assert_close(whole.weight, parts.weight, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1e-60, 1e60])
@pytest.mark.parametrize("p", [2, 4, 12])
def test_extreme_lengths_of_keys_and_queries_do_not_matter(p, scale):
    keys = heavy_tailed(300, 2, 1).clamp(-99, 99)
    queries = torch.randn(20, 2, generator=seeded(), dtype=torch.float64)
    plain = la.HeavyIndex(keys, 0.1, la.Power(p))(queries)
    scaled = la.HeavyIndex(keys * scale, 0.1, la.Power(p))(queries * scale)
    assert torch.equal(plain.index, scaled.index)
    torch.testing.assert_close(plain.weight, scaled.weight, rtol=1e-9, atol=1e-12)


def test_a_zero_query_gets_nothing_and_is_told_so():
    keys = torch.cat([heavy_tailed(200, 3), torch.zeros(200, 1)], 1)
    index = la.HeavyIndex(keys, 0.1, la.Power(4))
    queries = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 5.0]])
    with pytest.warns(
        UserWarning, match=r"queries: 2 give no key any weight .* the first is row 1; nothing is returned"
    ):
        hits = index(queries)
    assert hits.undefined.tolist() == [False, True, True]
    assert hits.valid.any(-1).tolist() == [True, False, False]
    assert (hits.weight[1:] == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index(queries[:1])
        assert index(queries[:0]).index.shape[0] == 0


def test_the_default_says_when_it_falls_back_to_a_sample():
    keys = heavy_tailed(3000, 4)
    with pytest.warns(
        UserWarning, match=r"no exact one fits Power\(p=3\) over 3,000 × 4 keys; fell back to one within"
    ):
        index = la.HeavyIndex(keys, 0.1, la.Power(3))
    assert index.stats()["normaliser"].startswith("within 1 ± 0.1 for each query")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.HeavyIndex(keys, 0.1, la.Power(4))


def test_a_sketched_scorer_finds_the_same_set():
    keys = heavy_tailed(3000, 4)
    plain = la.HeavyIndex(keys, 0.1)
    sketched = la.HeavyIndex(keys, 0.1, scorer=SketchedLeverage(Gaussian(128), 1.0))
    assert torch.equal(plain.universal.index, sketched.universal.index)


def test_stats_tell_what_is_held():
    keys = heavy_tailed(3000, 4).float()
    index = la.HeavyIndex(keys, 0.1)
    stats = index.stats()
    u = la.universal_set(keys, eps=0.1)
    assert (stats["n"], stats["d"], stats["rank"], stats["size"], stats["bound"]) == (3000, 4, 4, int(u.size), 40)
    assert stats["bytes"] == int(u.size) * (8 + 1 + 8 + 4 * 8) + 8 + 8 + 4 * 4 * 8
    assert json.loads(json.dumps(stats)) == stats
    longer = la.HeavyIndex(torch.cat([keys, torch.zeros(50_000, 4)]), 0.1).stats()
    assert longer["bytes"] == stats["bytes"]


CASES = [
    (la.Power(2), None),
    (la.Power(4), None),
    (la.Tukey(0.5), normaliser.Sampled(0.3, 0.1)),
    (la.Power(4), normaliser.TensorSketched(64, 0.9, 0.5)),
    (la.Power(2), normaliser.Sketched(Gaussian(1024))),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_saved_index_answers_bit_for_bit(case, tmp_path):
    loss, factory = CASES[case]
    keys = heavy_tailed(1500, 3).reshape(3, 500, 3)
    index = la.HeavyIndex(keys, 0.1, loss, factory)
    index.save(tmp_path / "keys.lev")
    again = la.HeavyIndex.load(tmp_path / "keys.lev")
    queries = torch.randn(3, 8, 3, generator=seeded())
    for name in ("index", "weight", "valid", "undefined"):
        assert torch.equal(getattr(index(queries), name), getattr(again(queries), name))
    assert again.stats() == index.stats()


def test_a_query_map_must_be_given_again(tmp_path):
    keys, lift = heavy_tailed(300, 3), TensorPower(2)
    index = la.HeavyIndex(keys, 0.1, key_map=lift, query_map=lift)
    index.save(tmp_path / "keys.lev")
    with pytest.raises(ValueError, match="query_map: the index was built with one"):
        la.HeavyIndex.load(tmp_path / "keys.lev")
    queries = torch.randn(4, 3, generator=seeded())
    assert torch.equal(la.HeavyIndex.load(tmp_path / "keys.lev", query_map=lift)(queries).index, index(queries).index)


def spoiled(folder):
    """Files that are no index, and what is said of each."""
    good = folder / "good.lev"
    la.HeavyIndex(heavy_tailed(300, 3), 0.1).save(good)
    whole = good.read_bytes()
    (folder / "cut.lev").write_bytes(whole[:-20])
    (folder / "header.lev").write_bytes(whole[:50])
    (folder / "empty.lev").write_bytes(b"")
    (folder / "text.lev").write_text("keys")
    save_file({"keys": torch.zeros(3, 2)}, folder / "other.lev")
    with safe_open(good, framework="pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, folder / "newer.lev", metadata=header | {"version": "99"})
    del tensors["normaliser.rows"]
    save_file(tensors, folder / "partial.lev", metadata=header)
    stream = la.KeyStream(3, eps=0.5)
    stream.update(torch.eye(3))
    stream.save(folder / "stream.lev")
    return {
        "missing.lev": "no such file",
        "cut.lev": "not a readable levattention index",
        "header.lev": "not a readable levattention index",
        "empty.lev": "not a readable levattention index",
        "text.lev": "not a readable levattention index",
        "other.lev": "expected a levattention index, got another program's file",
        "newer.lev": "expected version 1 of the format, got 99",
        "partial.lev": "not a readable levattention index",
        "stream.lev": "expected a levattention index, got levattention.stream",
    }


def test_files_that_are_no_index_are_refused(tmp_path):
    for name, message in spoiled(tmp_path).items():
        with pytest.raises(ValueError, match=re.escape(message)):
            la.HeavyIndex.load(tmp_path / name)


def test_heavy_keys_is_brute_force():
    keys = heavy_tailed(500, 3)
    for loss in (la.Power(1), la.Power(2), la.Power(4), la.Huber(), la.Tukey()):
        for q in (keys[3], torch.randn(3, generator=seeded(), dtype=torch.float64)):
            expected = (attention(keys, q.unsqueeze(0), loss)[0] >= 0.03).nonzero().squeeze(-1)
            assert torch.equal(la.heavy_keys(keys, q, 0.03, loss), expected)
            assert torch.equal(la.heavy_keys(keys.to_sparse_csr(), q, 0.03, loss), expected)
    assert la.heavy_keys(keys, torch.zeros(3), 0.03).tolist() == []
    tied = torch.eye(2).repeat(10, 1)
    assert la.heavy_keys(tied, torch.tensor([1.0, 0.0]), 0.1).tolist() == list(range(0, 20, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda k, i: i(torch.ones(4, 5)), "queries: expected shape ('m', 3), got (4, 5)"),
        (lambda k, i: i(torch.ones(3)), "queries: expected floats of shape (*batch, m, d), got (3,)"),
        (lambda k, i: i(torch.ones(2, 4, 3)), "queries: expected shape ('m', 3), got (2, 4, 3)"),
        (lambda k, i: i(torch.ones(4, 3, dtype=torch.long)), "of torch.int64"),
        (lambda k, i: i(torch.tensor([[1.0, 2, 3], [1, math.nan, 3]])), "queries: row 1 holds nan"),
        (lambda k, i: i(torch.tensor([[1.0, 2, math.inf]])), "queries: row 0 holds inf"),
        (lambda k, i: la.HeavyIndex(k, 0.0), "eps: expected a number in (0, 1], got 0.0"),
        (lambda k, i: la.HeavyIndex(k[:0], 0.1), "keys: expected at least one row"),
        (lambda k, i: la.HeavyIndex(k, 0.1, la.Softmax(1.0)), "loss: expected Power, Huber or Tukey"),
        (lambda k, i: la.HeavyIndex(k, 0.1, la.Power(3), normaliser.Exact()), "Exact is for even powers"),
        (lambda k, i: la.HeavyIndex(k, 0.1, scorer=la.scorers.Norm()), "certify no threshold"),
        (lambda k, i: la.HeavyIndex(torch.cat([k, k.new_full((1, 3), math.nan)]), 0.1), "keys: row 300 holds nan"),
        (
            lambda k, i: la.HeavyIndex(k, 0.1, key_map=TensorPower(2))(k),
            "queries: expected shape ('m', 6), got (300, 3)",
        ),
        (lambda k, i: la.heavy_keys(k, k[0][:2], 0.1), "q: expected shape (3,), got (2,)"),
        (lambda k, i: la.heavy_keys(k, k[0] * math.nan, 0.1), "q: row 0 holds nan"),
        (lambda k, i: la.heavy_keys(k.unsqueeze(0), k[0], 0.1), "keys: expected one head (n, d)"),
    ],
)
def test_bad_input_is_named(make, message):
    keys = heavy_tailed(300, 3)
    with pytest.raises(ValueError, match=re.escape(message)):
        make(keys, la.HeavyIndex(keys, 0.1))


def test_weights_agree_with_extended_precision_where_fp64_brute_force_does_not():
    """κ = 1e6 and a query in the last singular direction: the weight is right to 20·2⁻⁵²·κ against long doubles."""
    keys = tangled(2000, 6, 1e6)
    query = torch.linalg.svd(keys).Vh[-1:]
    hits = la.HeavyIndex(keys, 0.01)(query)
    inner = (query.numpy().astype(np.longdouble) @ keys.numpy().astype(np.longdouble).T)[0]
    true = inner**2 / power_sums(keys, query, 2)[0]
    assert int(hits.valid.sum()) == int((true >= 0.01).sum()) > 0
    got = hits.weight[hits.valid].numpy()
    assert np.abs(got / true[hits.index[hits.valid].numpy()] - 1).max() < 20 * 2**-52 * 1e6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loss", [la.Power(2), la.Power(4), la.Power(3), la.Tukey()])
def test_a_gpu_answers_as_a_cpu(loss):
    keys = heavy_tailed(2000, 8)
    queries = torch.randn(50, 8, generator=seeded(), dtype=torch.float64)
    factory = None if loss in (la.Power(2), la.Power(4)) else normaliser.Sampled(0.2, 0.01)
    near = la.HeavyIndex(keys, 0.05, loss, factory)(queries)
    far = la.HeavyIndex(keys.cuda(), 0.05, loss, factory)(queries.cuda())
    assert far.index.is_cuda
    assert torch.equal(far.index.cpu(), near.index)
    torch.testing.assert_close(far.weight.cpu(), near.weight, rtol=1e-9, atol=0)


KINDS = [
    (la.Power(2), None),
    (la.Power(4), None),
    (la.Power(1), normaliser.Sampled(0.2, 0.01)),
    (la.Huber(), normaliser.Sampled(0.2, 0.01)),
    (la.Tukey(), normaliser.Sampled(0.2, 0.01)),
    (la.Power(2), normaliser.Sketched(Gaussian(1024))),
    (la.Power(4), normaliser.TensorSketched(64, 0.9, 0.5)),
]


@pytest.mark.parametrize("case", range(len(KINDS)))
def test_sparse_keys_keys_of_zeros_and_a_single_key(case):
    loss, factory = KINDS[case]
    keys = heavy_tailed(600, 4).float()
    keys[keys.abs() < 0.3] = 0
    queries = torch.randn(9, 4, generator=seeded())
    dense, sparse = la.HeavyIndex(keys, 0.05, loss, factory), la.HeavyIndex(keys.to_sparse_csr(), 0.05, loss, factory)
    assert torch.equal(dense(queries).index, sparse(queries).index)
    torch.testing.assert_close(dense(queries).weight, sparse(queries).weight, rtol=1e-9, atol=0)
    nothing = la.HeavyIndex(torch.zeros(30, 4), 0.05, loss, factory)
    hits = nothing(queries, quiet=True)
    assert hits.undefined.all()
    assert not hits.valid.any()
    assert nothing.stats()["rank"] == nothing.stats()["size"] == 0
    one = la.HeavyIndex(keys[3:4], 0.05, loss, factory)(queries[:1])
    # ‖R̂q‖² is rough for a single key too, within δ = ½.
    least = 1 / 1.5 if isinstance(factory, normaliser.Sketched) else 1 - 1e-9
    assert least <= one.weight.item() <= 1 + 1e-12
