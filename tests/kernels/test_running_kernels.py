"""The sets of all prefixes in a few launches, against the recurrence taken key by key in fp64."""

import pytest
import torch

import dense
import reference
from levattention import kernels
from levattention.causal import RunningSet
from levattention.kernels import gram_matrix, running, selection
from levattention.scorers import Leverage
from levattention.select import Choice

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def spread(b, h, n, d, *, dtype=torch.float32, device="cpu", seed=0):
    """Keys whose scores lie far apart, so that rounding swaps no two, and whose Gram is well conditioned."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(0.3, 3, n)[torch.randperm(n, generator=generator)]
    return (torch.randn(b, h, n, d, generator=generator) * lengths.unsqueeze(-1)).to(device, dtype)


def plain(keys, k, *, chunk, first=0, mask=None):
    """The same by `RunningSet`, as sorted lists, (B, H, chunks)."""
    b, h, n, _ = keys.shape
    mask = torch.ones(b, h, n, dtype=torch.bool, device=keys.device) if mask is None else mask.expand(b, h, n)
    grows = RunningSet(keys.masked_fill(~mask.unsqueeze(-1), 0.0), mask, Choice(Leverage(), k, None))
    read, sets = 0, []
    for before in range(first, n, chunk):
        if before > read:
            grows.read(read, before)
            read = before
        kept = grows.chosen
        sets.append(
            [[[] if kept is None else kept.index[i, j][kept.valid[i, j]].tolist() for j in range(h)] for i in range(b)]
        )
    return [[[sorted(sets[c][i][j]) for c in range(len(sets))] for j in range(h)] for i in range(b)]


def ours(keys, k, **options):
    index, valid = kernels.running_top_k(keys, k, **options)
    assert not index[~valid].any()
    # In the order of positions as they lie.
    return [
        [[i[v].tolist() for i, v in zip(*head, strict=True)] for head in zip(*pair, strict=True)]
        for pair in zip(index, valid, strict=True)
    ]


@pytest.mark.parametrize(
    ("dtype", "b", "h", "n", "d", "k", "chunk", "first"),
    [
        *((dtype, 2, 1, 150, 16, 9, 50, 0) for dtype in DTYPES),
        *((dtype, 1, 2, 141, 16, 70, 40, 61) for dtype in DTYPES),  # more slots than a chunk has; keys before queries
        (torch.float32, 1, 1, 300, 32, 1, 90, 0),
        (torch.bfloat16, 1, 1, 700, 16, 300, 200, 0),  # held keys in two tiles, counts in 64 bits
        (torch.float32, 1, 1, 620, 80, 20, 200, 250),
        (torch.bfloat16, 1, 1, 620, 80, 20, 200, 250),
    ],
)
def test_the_sets_of_the_recurrence(dtype, b, h, n, d, k, chunk, first, device):
    keys = spread(b, h, n, d, dtype=dtype, device=device)
    got = ours(keys, k, chunk=chunk, first=first)
    assert got == plain(keys, k, chunk=chunk, first=first)
    assert [len(s) for s in got[0][0]] == [min(k, first + c * chunk) for c in range(len(got[0][0]))]


def test_against_brute_force_by_svd(device):
    keys = spread(1, 1, 150, 16, device=device)
    mask = torch.rand(150, generator=torch.Generator().manual_seed(1)) > 0.2
    exact = dense.causal_sets(keys[0, 0].double().cpu(), mask, 110, 40, 12, None)
    got = ours(keys, 12, chunk=40, first=40, mask=mask.to(device))
    assert got[0][0] == [sorted(kept) for kept, _ in exact]


def test_hidden_keys_are_in_no_set_and_may_hold_anything(device):
    keys = spread(2, 1, 160, 16, device=device)
    mask = torch.rand(2, 1, 160, generator=torch.Generator().manual_seed(2)).to(device) > 0.4
    mask[1, :, :75] = False
    keys.masked_fill_(~mask.unsqueeze(-1), float("nan"))
    got = ours(keys, 40, chunk=30, first=20, mask=mask)
    assert got == plain(keys, 40, chunk=30, first=20, mask=mask)
    assert got[1][0][:2] == [[], []]


def test_ties_go_to_the_smaller_position(device):
    # Whole periods of a basis: all scores are equal, and no later key may push an earlier one out.
    keys = torch.eye(16, device=device).repeat(12, 1)[None, None]
    got = ours(keys, 20, chunk=48, first=16)
    assert got == [[[list(range(16)), *[list(range(20))] * 3]]]


@pytest.mark.parametrize("growth", [1e3, 1e-3])
def test_scores_that_fall_or_stay_far_from_those_of_the_last_chunk(growth, device):
    keys = spread(1, 2, 240, 16, device=device)
    keys[..., 120:, :] *= growth
    assert ours(keys, 20, chunk=40) == plain(keys, 20, chunk=40)


def test_rank_deficient_keys_and_zero_rows(device):
    keys = spread(1, 1, 240, 16, device=device)
    keys[..., 5:] = keys[..., :1]
    keys[..., 30:50, :] = 0.0
    got = ours(keys, 8, chunk=60)
    assert got == plain(keys, 8, chunk=60)
    assert not {*range(30, 50)} & {*got[0][0][-1]}
    assert ours(torch.zeros_like(keys), 8, chunk=60) == [[[[], *[list(range(8))] * 3]]]


def test_strided_keys_of_a_fused_projection(device):
    packed = spread(2, 1, 60 * 6, 16, device=device).reshape(2, 60, 3, 2, 16)
    keys = packed.permute(2, 0, 3, 1, 4)[1]
    assert ours(keys, 7, chunk=30) == ours(keys.contiguous(), 7, chunk=30)


def test_stretches_change_nothing(monkeypatch, device):
    keys = spread(1, 1, 190, 16, device=device)
    whole = kernels.running_top_k(keys, 9, chunk=40)
    monkeypatch.setattr(running, "SCRATCH", 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, kernels.running_top_k(keys, 9, chunk=40), strict=True))


@pytest.mark.parametrize(
    ("dtype", "d", "length"),
    [
        *((dtype, 32, 90) for dtype in DTYPES),
        (torch.float32, 96, 150),
        (torch.float16, 96, 150),
        (torch.bfloat16, 256, 300),
    ],
)
def test_prefix_grams_and_their_scores(dtype, d, length, device):
    runs = 2
    # bf16 keys meet 16 bits of P, whose error counts twice in a square.
    bound = 2**-15 if dtype == torch.bfloat16 else 3e-6
    keys = spread(1, 1, runs * length, d, dtype=dtype, device=device)
    earlier = reference.gram(spread(1, 1, 400, d, device=device, seed=1))
    grams = gram_matrix.prefix_grams(keys, runs, earlier)
    whitenings = kernels.whiten(grams)
    scores = kernels.leverage(keys, whitenings)
    for c in range(runs):
        exact = earlier + reference.gram(keys[..., : (c + 1) * length, :])
        assert (grams[..., c, :, :] - exact).abs().max() <= 2e-6 * exact.abs().max()
        rows = keys[..., c * length : (c + 1) * length, :]
        forms = (rows.double() @ torch.linalg.inv(exact) * rows.double()).sum(-1)
        assert (scores[..., c * length : (c + 1) * length] - forms).abs().max() <= bound * forms.max()


@pytest.mark.parametrize("k", [7, 600])
def test_contenders_of_a_long_chunk_lie_in_the_order_of_positions(k, device):
    scores = torch.rand(2, 9001, generator=torch.Generator().manual_seed(0)).round(decimals=2).to(device)
    keys, positions = (found[:, 0].long() for found in selection.contenders(scores, k))
    assert torch.equal(positions, reference.top_k(scores, k).sort(-1).values)
    assert torch.equal(keys, scores.gather(-1, positions).view(torch.int32).long())


def test_counts_that_do_not_fit(device):
    keys = spread(1, 1, 20, 16, device=device)
    for k, options, match in (
        (0, {}, "k must"),
        (1025, {}, "k must"),
        (3, {"chunk": 0}, "chunk"),
        (3, {"first": 20}, "first"),
    ):
        with pytest.raises(ValueError, match=match):
            kernels.running_top_k(keys, k, **({"chunk": 5} | options))
