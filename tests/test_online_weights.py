"""Streams for losses other than x²: even p equals the offline lift; other weights miss no key that a sweep finds."""

import functools
import itertools

import pytest
import torch

import levattention as la
from levattention.features import TensorPower
from levattention.losses import Huber, Power, Tukey
from levattention.online_weights import symmetric_power
from levattention.passes import two_pass
from levattention.scorers.lift import Lift
from levattention.scorers.robust import Robust
from levattention.stream import KeyStream
from test_stream import STREAMS as HARD
from test_stream import deficient, growing, heavy_tailed, rank_growth

STREAMS = {
    "heavy tails": lambda d: heavy_tailed(400, d),
    "growing": lambda d: growing(400, d, -2, 2),
    "falling": lambda d: growing(400, d, 2, -2),
    "rank growth": lambda d: rank_growth(400, d),
    "duplicates": lambda d: heavy_tailed(80, d).repeat(5, 1),
    "zero rows": lambda d: heavy_tailed(400, d) * (torch.arange(400) % 3 == 0).unsqueeze(-1),
    "fp32": lambda d: heavy_tailed(400, d).float(),
}
EPS = 0.1


def members(u):
    return u.index[u.valid].sort().values.tolist()


def fed(matrix, size, loss, **options):
    stream = KeyStream(matrix.shape[-1], eps=EPS, loss=loss, **options)
    for block in matrix.split(size):
        stream.update(block)
    return stream


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("levattention.stream._BLOCK", 256)


@functools.cache
def heavy_keys(name, loss):
    """Keys whose share reaches ε for some direction in the plane and, where the loss has one, some scale."""
    matrix = STREAMS[name](2)
    angles = torch.linspace(0, torch.pi, 1501, dtype=torch.float64)
    responses = torch.stack([angles.cos(), angles.sin()], -1) @ matrix.double().mT
    responses = responses / responses.abs().amax(-1, keepdim=True)
    scales = (
        [1.0] if isinstance(loss, Power) else (loss.threshold * torch.logspace(-1, 7, 50, dtype=torch.float64)).tolist()
    )
    best = torch.zeros(len(matrix), dtype=torch.float64)
    for scale in scales:
        values = loss(responses * scale)
        best = torch.maximum(best, (values / values.sum(-1, keepdim=True).clamp(min=1e-300)).amax(0))
    return set((best >= EPS).nonzero().squeeze(-1).tolist())


@pytest.mark.parametrize("size", [1, 37, 400])
@pytest.mark.parametrize("p", [4, 6])
@pytest.mark.parametrize("name", STREAMS)
def test_even_p_equals_the_offline_lift(name, p, size, small_blocks):
    matrix = STREAMS[name](3)
    scores = Lift(p)(matrix)
    assert ((scores - EPS).abs() > 1e-8).all()
    stream = fed(matrix, size, Power(p))
    assert members(stream.finish()) == (scores >= EPS).nonzero().squeeze(-1).tolist()
    assert stream.stats()["peak"] <= TensorPower(p // 2).width(3) / EPS


@pytest.mark.parametrize("name", STREAMS)
def test_even_p_merges_across_different_first_blocks(name, small_blocks):
    matrix = STREAMS[name](3)
    scores = Lift(4)(matrix)
    parts = [fed(matrix[a:b], 50, Power(4), start=a) for a, b in itertools.pairwise([0, 60, 61, 250, 400])]
    for part in (parts[2], parts[0], parts[1]):
        parts[3].merge(part)
    assert members(parts[3].finish()) == (scores >= EPS).nonzero().squeeze(-1).tolist()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_symmetric_power_of_a_map(k, generator):
    rows, change = (torch.randn(m, 4, generator=generator, dtype=torch.float64) for m in (9, 4))
    lift = TensorPower(k)
    torch.testing.assert_close(lift(rows @ change), lift(rows) @ symmetric_power(change, k))


LOSSES = [Power(1), Power(1.5), Power(3), Power(5), Huber(), Huber(smooth=False), Tukey(0.1)]


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("name", STREAMS)
def test_no_key_that_a_sweep_finds_heavy_is_missed(name, loss, size, small_blocks):
    matrix = STREAMS[name](2)
    stream = fed(matrix, size, loss)
    assert heavy_keys(name, loss) <= set(members(stream.finish()))
    assert stream.stats()["peak"] < 400


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_merged_streams_miss_nothing(loss, small_blocks):
    matrix = STREAMS["heavy tails"](2)
    parts = [fed(matrix[a:b], 40, loss, start=a) for a, b in itertools.pairwise([0, 130, 131, 400])]
    parts[1].merge(parts[2])
    parts[1].merge(parts[0])
    assert heavy_keys("heavy tails", loss) <= set(members(parts[1].finish()))


@pytest.mark.parametrize("loss", [Power(4), Power(3), Huber(), Tukey()], ids=str)
def test_saved_in_the_middle(loss, tmp_path, small_blocks):
    matrix = STREAMS["heavy tails"](3)
    stream = fed(matrix[:200], 33, loss)
    stream.save(tmp_path / "s.lev")
    again = KeyStream.load(tmp_path / "s.lev")
    for one in (stream, again):
        one.update(matrix[200:])
    assert torch.equal(stream.finish().scores, again.finish().scores)
    assert torch.equal(stream.finish().index, again.finish().index)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_two_passes_miss_nothing(loss):
    matrix = STREAMS["growing"](2)
    u = two_pass(lambda: matrix.split(64), eps=EPS, loss=loss)
    assert heavy_keys("growing", loss) <= set(members(u))
    assert int(u.size) < 400


def worked_off(matrix, size, loss, **options):
    """Fed in blocks that are each worked off at once: weights depend on where blocks end."""
    stream = KeyStream(matrix.shape[-1], eps=EPS, loss=loss, **options)
    for block in matrix.split(size, dim=-2):
        stream.update(block)
        assert stream.candidates is not None
    return stream.finish()


def test_heads_are_independent():
    heads = torch.stack([heavy_tailed(200, 3, seed) for seed in range(3)])
    for loss in (Power(4), Power(1), Tukey()):
        u = worked_off(heads, 50, loss, batch=(3,))
        for head in range(3):
            alone = worked_off(heads[head], 50, loss)
            torch.testing.assert_close(u.scores[head][u.valid[head]], alone.scores[alone.valid], rtol=1e-6, atol=0)


def test_sizes_that_cannot_fit_are_refused_with_their_size():
    with pytest.raises(ValueError, match=r"45,760 columns, a Gram of 16.8 GB"):
        KeyStream(64, eps=0.1, loss=Power(6))
    with pytest.raises(ValueError, match="expected Power, Huber or Tukey"):
        KeyStream(4, eps=0.1, loss=la.Softmax(1.0))


def test_rank_deficient_streams(small_blocks):
    matrix = deficient(300, 4, 2)
    scores = Lift(4)(matrix)
    assert members(fed(matrix, 30, Power(4)).finish()) == (scores >= EPS).nonzero().squeeze(-1).tolist()
    for loss in (Power(1), Power(3), Huber(), Tukey()):
        assert int(fed(matrix, 30, loss).finish().size) >= 0


@pytest.mark.parametrize("p", [1, 1.5, 3, 5])
def test_repeated_passes_reach_the_offline_bound(p):
    matrix = heavy_tailed(500, 4)
    offline = la.scorers.Lewis(p)(matrix)
    u = two_pass(lambda: matrix.split(64), eps=EPS, loss=Power(p))
    assert u.route == "repeated passes"
    torch.testing.assert_close(u.scores[u.valid], offline[u.index[u.valid]], rtol=2e-2, atol=0)
    assert {i for i, score in enumerate(offline.tolist()) if score >= EPS * 1.02} <= set(members(u))


def test_repeated_passes_for_huber_reach_the_offline_set():
    matrix = heavy_tailed(500, 4)
    scores = Robust(Huber()).decide(matrix, EPS)
    u = two_pass(lambda: matrix.split(64), eps=EPS, loss=Huber())
    torch.testing.assert_close(u.scores[u.valid], scores[u.index[u.valid]], rtol=1e-2, atol=0)


def test_passes_that_differ_are_refused():
    lengths = iter([100, 90])
    with pytest.raises(ValueError, match="expected the same rows in every pass, got 100 and then 90"):
        two_pass(lambda: heavy_tailed(next(lengths), 3).split(30), eps=EPS)


@pytest.mark.parametrize(("loss", "eps"), [(Tukey(), 0.04), (Tukey(), 0.3), (Huber(), 0.04)], ids=str)
def test_repeated_passes_find_the_offline_set_on_every_stream(loss, eps):
    for name, make in HARD.items():
        matrix = make()
        scores = Robust(loss).decide(matrix, eps)
        # Both stop within a thousandth of their fixed points.
        sure, maybe = ({i for i, s in enumerate(scores.tolist()) if s >= eps * factor} for factor in (1.005, 0.995))
        found = set(members(two_pass(lambda rows=matrix: rows.split(450), eps=eps, loss=loss)))
        assert sure <= found <= maybe, name


def test_even_p_where_the_first_rows_know_little_of_what_follows(small_blocks):
    # A first block that lacks directions, which then come a million times fainter, would leave their squares to noise.
    faint = heavy_tailed(400, 4) * torch.tensor([1.0, 1.0, 1e-6, 1e-7], dtype=torch.float64)
    faint[:70, 2:] = 0
    scores = Lift(4)(faint)
    expected = (scores >= EPS).nonzero().squeeze(-1).tolist()
    assert members(fed(faint, 1, Power(4)).finish()) == expected
    parts = [fed(faint[a:b], 50, Power(4), start=a) for a, b in itertools.pairwise([0, 2, 3, 71, 250, 400])]
    for part in parts[1:]:
        parts[0].merge(part)
    assert members(parts[0].finish()) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_even_p_leaves_out_directions_that_are_rounding(dtype, small_blocks):
    matrix = deficient(300, 4, 2).to(dtype)
    scores = Lift(4)(matrix)
    u = fed(matrix, 30, Power(4)).finish()
    assert members(u) == (scores >= EPS).nonzero().squeeze(-1).tolist()
    assert int(u.rank) == 3
