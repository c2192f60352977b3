"""One pass equals offline, whatever the blocks, the order and the merges; and what a stream survives."""

import itertools

import pytest
import torch

import levattention as la
from levattention.losses import Power
from levattention.online_weights import sieve_for
from levattention.passes import two_pass
from levattention.stream import KeyStream
from strategies import conditioned, deficient, heavy_tailed, spikes


def by_leverage(matrix, descending):
    return matrix[la.leverage_scores(matrix).argsort(descending=descending)]


def growing(n, d, low, high, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(low, high, n, dtype=torch.float64).unsqueeze(-1)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) * scales


def rank_growth(n, d, seed=0):
    """A new direction appears every n/d rows, ever longer."""
    matrix = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    steps = torch.arange(n).unsqueeze(-1) * d // n
    return matrix * (torch.arange(d) <= steps)


def one_big_then_small(n, d):
    matrix = growing(n, d, 0, 0)
    matrix[0] *= 1e6
    return matrix


def new_directions_at_the_end(n, d):
    matrix = growing(n, d, 0, 0)
    matrix[: n - 5, d // 2 :] = 0
    matrix[n - 5 :, d // 2 :] *= 1e-4
    return matrix


def duplicates(n, d):
    return growing(n // 10, d, -1, 1).repeat(10, 1)


STREAMS = {
    "gauss": lambda: growing(900, 8, 0, 0),
    "gauss fp32": lambda: growing(900, 8, 0, 0).float(),
    "gauss bf16": lambda: growing(900, 8, 0, 0).bfloat16(),
    "growing 1e-6 to 1e6": lambda: growing(900, 8, -6, 6),
    "growing fp32": lambda: growing(900, 8, -6, 6).float(),
    "falling 1e6 to 1e-6": lambda: growing(900, 8, 6, -6),
    "rank growth": lambda: rank_growth(900, 8),
    "rank growth fp32": lambda: rank_growth(900, 8).float(),
    "rank growth, growing": lambda: rank_growth(900, 8) * torch.logspace(-3, 3, 900, dtype=torch.float64).unsqueeze(-1),
    "rank 3 of 8": lambda: deficient(900, 8, 3),
    "rank 3 of 8 fp32": lambda: deficient(900, 8, 3).float(),
    "rank 3 of 8 bf16": lambda: deficient(900, 8, 3).bfloat16(),
    "duplicates": lambda: duplicates(900, 8),
    "zero rows": lambda: growing(900, 8, 0, 0) * (torch.arange(900) % 3 == 0).unsqueeze(-1),
    "sorted by leverage": lambda: by_leverage(heavy_tailed(900, 8), False),
    "reversed by leverage": lambda: by_leverage(heavy_tailed(900, 8), True),
    "kappa 1e4": lambda: conditioned(900, 8, 1e4),
    "kappa 1e7": lambda: conditioned(900, 8, 1e7),
    "spikes": lambda: spikes(900, 8),
    "spikes last": lambda: spikes(900, 8).flip(0),
    "one big then small": lambda: one_big_then_small(900, 8),
    "new directions at the end": lambda: new_directions_at_the_end(900, 8),
    "fewer rows than columns": lambda: growing(5, 8, 0, 1),
}
EPS = 0.04


def members(u):
    return u.index[u.valid].sort().values.tolist()


def offline(matrix):
    scores = la.leverage_scores(matrix)
    assert ((scores - EPS).abs() > 1e-8).all(), "the claim is for scores clear of ε"
    return (scores >= EPS).nonzero().squeeze(-1).tolist()


def fed(matrix, size, **options):
    stream = KeyStream(matrix.shape[-1], eps=EPS, **options)
    for block in matrix.split(size):
        stream.update(block)
    return stream


@pytest.fixture
def small_blocks(monkeypatch):
    """Work off every 32 rows, so that a short stream prunes many times."""
    monkeypatch.setattr("levattention.stream._BLOCK", 256)


@pytest.mark.parametrize("size", [1, 7, 32, 333, 900])
@pytest.mark.parametrize("name", STREAMS)
def test_one_pass_equals_offline(name, size, small_blocks):
    matrix = STREAMS[name]()
    stream = fed(matrix, size)
    u = stream.finish()
    assert members(u) == offline(matrix)
    exact = la.leverage_scores(matrix)
    torch.testing.assert_close(u.scores[u.valid], exact[u.index[u.valid]], rtol=1e-6, atol=0)
    rank = int(la.scorers.Leverage(rtol="exact").report(matrix).rank)
    assert stream.stats()["kept"] <= rank / EPS
    assert stream.stats()["rows"] == len(matrix)


@pytest.mark.parametrize("name", STREAMS)
def test_two_passes_equal_offline(name):
    matrix = STREAMS[name]()
    u = two_pass(lambda: matrix.split(100), eps=EPS)
    assert members(u) == offline(matrix)


TREES = {
    "chain": lambda parts: _chain(parts),
    "balanced": lambda parts: _balanced(parts),
    "backwards": lambda parts: _chain(parts[::-1]),
}


def _chain(parts):
    for part in parts[1:]:
        parts[0].merge(part)
    return parts[0]


def _balanced(parts):
    while len(parts) > 1:
        parts = [_chain(list(pair)) for pair in itertools.zip_longest(parts[::2], parts[1::2]) if pair[1]] + (
            [parts[-1]] if len(parts) % 2 else []
        )
    return parts[0]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", STREAMS)
def test_merges_equal_offline(name, tree, small_blocks):
    matrix = STREAMS[name]()
    cuts = [0, len(matrix) // 7, len(matrix) // 3, len(matrix) // 3, 4 * len(matrix) // 5, len(matrix)]
    parts = [
        fed(matrix[a:b], 50, start=a) if b > a else KeyStream(8, eps=EPS, start=a) for a, b in itertools.pairwise(cuts)
    ]
    merged = TREES[tree](parts)
    assert members(merged.finish()) == offline(matrix)
    assert merged.count == len(matrix)


def test_without_a_start_rows_of_a_merged_stream_follow():
    matrix = heavy_tailed(600, 5)
    first, second = fed(matrix[:250], 99), fed(matrix[250:], 99)
    first.merge(second)
    assert members(first.finish()) == offline(matrix)
    first.update(matrix[:10])
    assert first.end == 610


def test_memory_stays_under_rank_over_eps_where_keep_forever_does_not(small_blocks):
    matrix = growing(3000, 8, -6, 6)
    stream = fed(matrix, 100)
    assert stream.stats()["peak"] <= 8 / EPS
    # Every new row of a growing stream is heavy when it comes, so the paper's rule keeps nearly all of them.
    arriving = sum(float(la.leverage_scores(matrix[: i + 1])[-1]) >= EPS for i in range(0, 3000, 100))
    assert arriving >= 25


def test_heads_are_independent(small_blocks):
    heads = torch.stack([heavy_tailed(500, 6, seed) for seed in range(4)]).reshape(2, 2, 500, 6)
    stream = KeyStream(6, eps=EPS, batch=(2, 2))
    for block in heads.split(70, dim=-2):
        stream.update(block)
    u = stream.finish()
    scores = la.leverage_scores(heads)
    for i, j in itertools.product(range(2), range(2)):
        one = u.index[i, j][u.valid[i, j]].sort().values
        assert one.tolist() == (scores[i, j] >= EPS).nonzero().squeeze(-1).tolist()
    assert stream.rows.shape[:2] == (2, 2)
    places = stream.positions
    for i, j in itertools.product(range(2), range(2)):
        held = places[i, j] >= 0
        assert torch.equal(stream.rows[i, j][held], heads[i, j][places[i, j][held]])


def test_payload_stays_with_its_row(small_blocks):
    matrix = heavy_tailed(500, 6)
    values = torch.randn(500, 3, 2)
    stream = KeyStream(6, eps=EPS)
    for rows, carried in zip(matrix.split(60), values.split(60), strict=True):
        stream.update(rows, carried)
    assert torch.equal(stream.payload, values[stream.positions])
    with pytest.raises(ValueError, match="with every block or with none"):
        stream.update(matrix[:3])


def test_the_screen_spares_rows_and_loses_none(small_blocks):
    matrix = growing(2000, 8, 0, 0)
    matrix[::50] *= 30
    stream = fed(matrix, 200)
    assert stream.stats()["spared"] > 0.5
    assert members(stream.finish()) == offline(matrix)


@pytest.mark.parametrize("scale", [1e-25, 1e-6, 1e6, 1e17])
def test_quick_looks_in_fp32_lose_no_row_at_any_scale(scale, small_blocks):
    # Squares of fp32 entries at 1e-25 underflow; sums of those at 1e17 come near overflow.
    matrix = ((growing(2000, 8, 0, 0) + (torch.arange(2000) % 200 == 0).unsqueeze(-1) * 30) * scale).float()
    assert (matrix != 0).all()
    stream = fed(matrix, 200)
    assert members(stream.finish()) == offline(matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_dismissed_in_fp32_is_under_eps(dtype, small_blocks):
    matrix = conditioned(4000, 40, 500.0).to(dtype)
    sieve = sieve_for(Power(2), 40, 1, torch.device("cpu"), EPS)
    sieve.update(matrix.unsqueeze(0))
    scores = sieve.summary.prune().bound(matrix.unsqueeze(0))[0]
    eps = float(scores.median())
    gone = sieve.dismisses(matrix.unsqueeze(0), eps)[0]
    assert (scores[gone] < eps).all()
    assert (scores >= la.leverage_scores(matrix) - 1e-12).all()
    # Not by a vacuous margin: nearly all that is under ε by a few per cent is dismissed.
    assert gone[scores < 0.9 * eps].float().mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_directions_near_the_noise_floor_of_the_input(dtype, small_blocks):
    # Truncation breaks monotonicity: a direction may count as rounding on the way and not in the end, or the reverse.
    low, high = (-8, -4.5) if dtype is torch.float32 else (-4, -0.5)
    for seed in range(15):
        generator = torch.Generator().manual_seed(seed)
        scales = 10 ** (low + (high - low) * torch.rand(6, generator=generator, dtype=torch.float64))
        scales[:2] = 1
        matrix = torch.randn(600, 6, generator=generator, dtype=torch.float64) * scales
        if seed % 2:
            ramp = torch.logspace(0, 2 * torch.rand(1, generator=generator).item(), 600, dtype=torch.float64)
            matrix *= (ramp if seed % 4 == 1 else ramp.flip(0)).unsqueeze(-1)
        if seed % 3 == 0:
            matrix[:300, 3:] = 0
        if seed % 5:
            matrix = matrix @ torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
        matrix = matrix.to(dtype)
        assert members(fed(matrix, 37).finish()) == offline(matrix), seed


def test_a_buffer_may_be_reused(small_blocks):
    matrix = heavy_tailed(300, 4)
    stream, buffer = KeyStream(4, eps=EPS), torch.empty(3, 4, dtype=torch.float64)
    for block in matrix.split(3):
        buffer.copy_(block)
        stream.update(buffer)
        buffer.fill_(1e9)
    assert members(stream.finish()) == offline(matrix)


@pytest.mark.parametrize("name", ["gauss fp32", "kappa 1e7", "rank 3 of 8 bf16"])
def test_saved_and_loaded_in_the_middle(name, tmp_path, small_blocks):
    matrix = STREAMS[name]()
    stream = fed(matrix[:400], 64, start=1000)
    stream.save(tmp_path / "state.lev")
    again = KeyStream.load(tmp_path / "state.lev")
    for one in (stream, again):
        one.update(matrix[400:])
    a, b = stream.finish(), again.finish()
    assert torch.equal(a.index, b.index)
    assert torch.equal(a.scores, b.scores)
    assert members(a) == [i + 1000 for i in offline(matrix)]
    assert again.stats() == stream.stats()


def test_bad_state_files_are_named(tmp_path):
    path = tmp_path / "state.lev"
    fed(heavy_tailed(50, 4), 10).save(path)
    whole = path.read_bytes()
    (tmp_path / "short.lev").write_bytes(whole[:-20])
    (tmp_path / "junk.lev").write_bytes(b"hello")
    (tmp_path / "newer.lev").write_bytes(whole.replace(b'"version":"1"', b'"version":"9"'))
    (tmp_path / "other.lev").write_bytes(whole.replace(b"levattention.stream", b"levattention.heavys"))
    for name, message in [
        ("missing", "no such file"),
        ("short", "not a readable levattention stream"),
        ("junk", "not a readable levattention stream"),
        ("newer", "expected version 1 of the format, got 9"),
        ("other", "expected a levattention stream"),
    ]:
        with pytest.raises(ValueError, match=message):
            KeyStream.load(tmp_path / f"{name}.lev")


def test_bad_blocks_are_refused_and_leave_the_stream_as_it_was():
    matrix = heavy_tailed(100, 4)
    stream = fed(matrix[:50], 50)
    bad = matrix[50:60].clone()
    bad[3, 1] = float("nan")
    for block, message in [
        (bad, "block at position 50: row 3 holds nan"),
        (torch.zeros(2, 5), "expected shape"),
        (torch.zeros(1, 2, 4), "expected shape"),
        (torch.zeros(2, 4, dtype=torch.int32), "expected fp16"),
    ]:
        with pytest.raises(ValueError, match=message):
            stream.update(block)
    stream.update(matrix[50:])
    assert members(stream.finish()) == offline(matrix)


def test_empty_and_mismatched_streams():
    with pytest.raises(ValueError, match="the stream is empty"):
        KeyStream(4, eps=0.1).finish()
    with pytest.raises(ValueError, match="expected a stream with"):
        KeyStream(4, eps=0.1).merge(KeyStream(4, eps=0.2))
    with pytest.raises(ValueError, match="at least one block"):
        two_pass(lambda: [], eps=0.1)
    stream = KeyStream(4, eps=0.1)
    stream.update(torch.zeros(0, 4))
    stream.update(torch.zeros(3, 4))
    assert stream.finish().size == 0
