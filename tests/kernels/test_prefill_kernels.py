"""Causal attention over local keys and the sets of the chunks, against a dense mask in fp64."""

import pytest
import torch

import reference
from levattention import kernels
from test_attention_kernels import BOUND, relative


def problem(b, heads, kv_heads, m, n, d, c, chunk, *, dtype=torch.float32, device="cpu", one=False, seed=0):
    """q, k, v, and for each chunk a set of distinct rows anywhere among the keys, some slots of it not valid."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(b, heads, m, d, generator=generator)
    k, v = torch.randn(2, b, kv_heads, n, d, generator=generator)
    sets = 1 if one else -(-m // chunk)
    index = torch.rand(b, kv_heads, sets, n, generator=generator).argsort(-1)[..., :c]
    valid = torch.rand(index.shape, generator=generator) > 0.2
    return *(t.to(device, dtype) for t in (q, k, v)), index.to(device), valid.to(device)


def check(q, k, v, index, valid, *, bound, scale=0.3, mask=None, **shape):
    """Compare outputs and every gradient with fp64, through both results."""
    seen = reference.causal_weights(index, valid, q.shape[2], k.shape[2], mask=mask, **shape)
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    exact = reference.masked_attention(*exact_leaves, seen, scale=scale)
    got = kernels.causal_attention(*leaves, index, valid, scale=scale, mask=mask, **shape)
    (out, lse), (exact_out, exact_lse) = ([t.detach() for t in pair] for pair in (got, exact))
    assert out.dtype == q.dtype
    assert out.stride() == torch.empty_like(q).stride()
    assert relative(out, exact_out) <= bound
    finite = torch.isfinite(exact_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    assert (lse[~finite] == float("-inf")).all()
    assert not out[~finite].any()
    assert (lse - exact_lse)[finite].abs().max() <= max(2e-6, bound) * exact_lse[finite].abs().max()
    generator = torch.Generator().manual_seed(9)
    seeds = [torch.randn(t.shape, generator=generator).to(t) for t in got]
    grads = torch.autograd.grad([got[0], got[1].masked_fill(~finite, 0)], leaves, seeds)
    sums = [exact[0], exact[1].masked_fill(~finite, 0)]
    exact_grads = torch.autograd.grad(sums, exact_leaves, [s.double() for s in seeds])
    for got_grad, exact_grad in zip(grads, exact_grads, strict=True):
        assert got_grad.shape == exact_grad.shape
        assert relative(got_grad, exact_grad) <= 2 * bound


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "m", "n", "d", "c", "chunk", "reach"),
    [
        (2, 1, 137, 137, 64, 20, 60, 0),  # chunks of odd length, the last one short
        (1, 1, 110, 230, 32, 70, 40, 100),  # a prefix without queries; a window longer than a chunk
        (1, 1, 290, 290, 16, 5, 256, 9),  # a window shorter than a chunk
        (3, 1, 1, 50, 80, 9, 7, 4),  # one query
    ],
)
def test_matches_a_dense_mask(dtype, heads, kv_heads, m, n, d, c, chunk, reach, device):
    data = problem(2 if m < 100 else 1, heads, kv_heads, m, n, d, c, chunk, dtype=dtype, device=device)
    check(*data, chunk=chunk, reach=reach, bound=BOUND[dtype])


@pytest.mark.parametrize("reach", [0, 1, 5, 1 << 40])
@pytest.mark.parametrize("chunk", [3, 16, 200])
def test_no_key_counts_twice_whatever_the_window(chunk, reach, device):
    data = problem(1, 1, 1, 35, 48, 16, 11, chunk, device=device, seed=chunk)
    check(*data, chunk=chunk, reach=reach, bound=2e-6)


def test_wide_heads(device):
    check(*problem(1, 1, 1, 70, 70, 256, 18, 33, device=device), chunk=33, reach=3, bound=2e-6)


def test_one_set_for_all_chunks(device):
    check(*problem(1, 4, 2, 50, 60, 32, 30, 16, device=device, one=True), chunk=16, reach=2, bound=2e-6)


def test_hidden_keys_may_hold_anything(device):
    q, k, v, index, valid = problem(2, 2, 1, 75, 90, 32, 12, 20, device=device)
    mask = torch.rand(2, 1, 90, generator=torch.Generator().manual_seed(5)).to(device) > 0.3
    # A stretch longer than window and chunk, so that queries of the first chunk see nothing at all.
    mask[1, :, :40] = False
    valid &= mask.unsqueeze(2).expand(2, 1, len(index[0, 0]), 90).gather(-1, index)
    k.masked_fill_(~mask.unsqueeze(-1), float("nan"))
    v.masked_fill_(~mask.unsqueeze(-1), float("nan"))
    check(q, k, v, index, valid, mask=mask, chunk=20, reach=6, bound=2e-6)
    out, lse = kernels.causal_attention(q, k, v, index, valid, mask=mask, chunk=20, reach=6, scale=0.3)
    assert not out[1, :, :20].any()
    assert (lse[1, :, :20] == float("-inf")).all()


def test_slots_that_are_not_valid_may_point_anywhere(device):
    q, k, v, index, valid = problem(1, 1, 1, 40, 40, 16, 8, 10, device=device)
    k[0, 0, 0] = v[0, 0, 0] = float("nan")
    index, valid = index.masked_fill(~valid, 0), valid & (index > 0)
    out, _ = kernels.causal_attention(q, k, v, index, valid, chunk=10, scale=0.3)
    assert torch.isfinite(out[..., 10:, :]).all()


def test_strided_inputs_and_output_layout(device):
    qkv = torch.randn(2, 45, 3, 3, 32, generator=torch.Generator().manual_seed(1)).to(device)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    *_, index, valid = problem(2, 3, 3, 45, 45, 32, 12, 20, device=device)
    check(q, k, v, index, valid, chunk=20, reach=4, bound=2e-6)


@pytest.mark.parametrize("reach", range(1, 4))
def test_the_last_query_in_reach_of_a_tile_of_keys(reach, device):
    # Tiles of 32 keys and queries, chunks that end with them: only the window goes on into the next tile.
    q, k, v, index, valid = problem(1, 1, 1, 66, 66, 16, 3, 16, device=device)
    check(q, k, v, index, valid & False, chunk=16, reach=reach, bound=2e-6)


def test_chunks_of_one(device):
    check(*problem(1, 1, 1, 9, 30, 16, 5, 1, device=device), chunk=1, reach=2, bound=2e-6)


def test_negative_scale(device):
    check(*problem(1, 1, 1, 30, 30, 16, 4, 8, device=device), chunk=8, scale=-0.4, bound=2e-6)


def test_gradients_are_deterministic(device):
    q, k, v, index, valid = problem(1, 2, 1, 50, 50, 16, 9, 20, device=device)

    def grads():
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, _ = kernels.causal_attention(*leaves, index, valid, chunk=20, scale=0.2)
        return torch.autograd.grad(out.square().sum(), leaves)

    assert all(torch.equal(a, b) for a, b in zip(grads(), grads(), strict=True))


def test_one_of_the_results_alone_has_its_gradients(device):
    q, k, v, index, valid = problem(1, 1, 1, 40, 40, 16, 5, 16, device=device)
    seen = reference.causal_weights(index, valid, 40, 40, chunk=16)
    for part in (0, 1):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        exact_leaves = [t.double().requires_grad_() for t in (q, k, v)]
        got = kernels.causal_attention(*leaves, index, valid, chunk=16, scale=0.3)[part]
        exact = reference.masked_attention(*exact_leaves, seen, scale=0.3)[part]
        wanted = 3 - part  # lse does not depend on the values
        grads = torch.autograd.grad(got.square().sum(), leaves[:wanted])
        exact_grads = torch.autograd.grad(exact.square().sum(), exact_leaves[:wanted])
        assert all(relative(a, b) <= 4e-6 for a, b in zip(grads, exact_grads, strict=True))


def test_operators_are_well_formed(device, monkeypatch):
    monkeypatch.undo()
    q, k, v, index, valid = problem(1, 2, 1, 20, 24, 16, 3, 8, device=device)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    mask = torch.ones(1, 1, 24, dtype=torch.bool, device=device)
    args = (q, k, v, index, valid, mask, 8, 2, 0.2)
    how = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}
    torch.library.opcheck(torch.ops.levattention.causal_attention.default, args, **how)
    torch.library.opcheck(torch.ops.levattention.running_top_k.default, (k.detach(), 3, 4, 8, mask), **how)


def test_shapes_that_do_not_fit(device):
    q, k, v, index, valid = problem(1, 2, 1, 30, 30, 16, 4, 8, device=device)
    for args, options, match in (
        ((q, k[:, :, :20], v[:, :, :20], index, valid), {}, "positions"),
        ((q, k, v[..., :8], index, valid), {}, "do not fit together"),
        ((q, k, v, index[:, :, :3], valid[:, :, :3]), {}, "index, valid"),
        ((q, k, v, index, valid[..., :2]), {}, "index, valid"),
        ((q.double(), k, v, index, valid), {}, "one dtype"),
        ((q, k, v, index, valid), {"chunk": 0}, "chunk"),
        ((q, k, v, index, valid), {"reach": -1}, "reach"),
    ):
        with pytest.raises(ValueError, match=match):
            kernels.causal_attention(*args, **({"chunk": 8, "scale": 1.0} | options))
