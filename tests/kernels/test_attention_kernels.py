"""Gathered attention, its gradients, and the whole of LevAttention against their plain torch twins."""

import pytest
import torch

import reference
from levattention import kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter truncates to bf16 where the device rounds, hence twice the device's bound.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def problem(b, heads, kv_heads, m, n, d, c, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(b, heads, m, d, generator=generator)
    k, v = torch.randn(2, b, kv_heads, n, d, generator=generator)
    index = torch.rand(b, kv_heads, n, generator=generator).argsort(-1)[..., :c]
    return *(t.to(device=device, dtype=dtype) for t in (q, k, v)), index.to(device)


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check(q, k, v, index, *, bias=None, valid=None, scale=0.2, bound=2e-6):
    """Compare outputs and every gradient with fp64, through both results."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)] + ([bias] if bias is not None else [])
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    exact_bias = exact_leaves[3] if bias is not None else None
    got = kernels.gathered_attention(*leaves[:3], index, bias, scale=scale, valid=valid)
    exact = reference.attention(*exact_leaves[:3], index, exact_bias, scale=scale, valid=valid)
    assert relative(got[0].detach(), exact[0].detach()) <= bound
    finite = torch.isfinite(exact[1])
    assert torch.equal(torch.isfinite(got[1]), finite)
    assert relative(got[1].detach()[finite], exact[1].detach()[finite]) <= bound
    generator = torch.Generator().manual_seed(9)
    seeds = [torch.randn(t.shape, generator=generator).to(t) for t in got]
    grads = torch.autograd.grad([got[0], got[1].masked_fill(~finite, 0)], leaves, seeds)
    exact_loss = [exact[0], exact[1].masked_fill(~finite, 0)]
    exact_grads = torch.autograd.grad(exact_loss, exact_leaves, [s.double() for s in seeds])
    for got_grad, exact_grad in zip(grads, exact_grads, strict=True):
        assert got_grad.shape == exact_grad.shape
        assert relative(got_grad, exact_grad) <= 2 * bound
    return grads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "m", "n", "d", "c"),
    [(2, 2, 197, 197, 64, 32), (2, 1, 33, 50, 32, 7), (1, 1, 130, 300, 128, 130), (1, 1, 40, 60, 80, 20)],
)
def test_attention_and_gradients(dtype, heads, kv_heads, m, n, d, c, device):
    q, k, v, index = problem(2, heads, kv_heads, m, n, d, c, dtype, device)
    _, dk, dv = check(q, k, v, index, bound=BOUND[dtype])
    chosen = torch.zeros(k.shape[:3], dtype=torch.bool, device=device).scatter_(2, index, True)
    assert not dk[~chosen].any()
    assert not dv[~chosen].any()


def test_wide_heads(device):
    check(*problem(1, 2, 1, 20, 40, 256, 18, device=device))
    check(*problem(1, 1, 1, 20, 40, 96, 33, torch.bfloat16, device), bound=BOUND[torch.bfloat16])


def test_one_query_and_one_slot(device):
    check(*problem(1, 3, 3, 1, 5, 32, 1, device=device))


def test_bias_and_invalid_slots(device):
    q, k, v, index = problem(2, 4, 2, 37, 50, 32, 21, device=device)
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(2, 2, 21, generator=generator).to(device)
    valid = (torch.rand(2, 2, 21, generator=generator) > 0.3).to(device)
    # An invalid slot repeats a row that a valid one uses.
    index = torch.where(valid, index, index[..., :1])
    valid[..., 0] = True
    check(q, k, v, index, bias=bias.requires_grad_(), valid=valid)


def test_minus_infinity_excludes_a_slot(device):
    q, k, v, index = problem(1, 1, 1, 10, 20, 32, 6, device=device)
    bias = torch.zeros(1, 1, 6, device=device)
    bias[..., 4:] = float("-inf")
    out, lse = kernels.gathered_attention(q, k, v, index, bias, scale=0.2)
    exact, exact_lse = kernels.gathered_attention(q, k, v, index[..., :4].contiguous(), scale=0.2)
    assert torch.allclose(out, exact, atol=1e-6)
    assert torch.allclose(lse, exact_lse, atol=1e-6)


@pytest.mark.parametrize("c", [6, 140])
def test_no_usable_slot_gives_zeros(c, device):
    q, k, v, index = problem(2, 1, 1, 10, 150, 32, c, device=device)
    k[1, 0, 0] = float("nan")
    valid = torch.ones(2, 1, c, dtype=torch.bool, device=device)
    valid[1] = False
    index[1] = 0
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = kernels.gathered_attention(q, k, v, index, scale=0.2, valid=valid)
    assert not out[1].any()
    assert (lse[1] == float("-inf")).all()
    assert out[0].any()
    grads = torch.autograd.grad(out.square().sum(), [q, k, v])
    assert all(torch.isfinite(g).all() and not g[1].any() for g in grads)


def test_strided_inputs_and_output_layout(device):
    b, n, heads, d = 2, 45, 3, 32
    qkv = torch.randn(b, n, 3, heads, d, generator=torch.Generator().manual_seed(1)).to(device)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    index = torch.arange(0, 36, 3, device=device).expand(b, heads, 12)
    out, _ = kernels.gathered_attention(q, k, v, index, scale=0.2)
    same, _ = kernels.gathered_attention(q.contiguous(), k.contiguous(), v.contiguous(), index.contiguous(), scale=0.2)
    assert torch.equal(out, same)
    leaf = qkv.clone().requires_grad_()
    q, k, v = leaf.permute(2, 0, 3, 1, 4)
    out, _ = kernels.gathered_attention(q, k, v, index, scale=0.2)
    (got,) = torch.autograd.grad(out.transpose(1, 2).reshape(b, n, -1).square().sum(), leaf)
    exact_leaf = qkv.double().requires_grad_()
    exact_out, _ = reference.attention(*exact_leaf.permute(2, 0, 3, 1, 4), index, scale=0.2)
    (exact,) = torch.autograd.grad(exact_out.square().sum(), exact_leaf)
    assert relative(got, exact) < 4e-6


def test_negative_scale(device):
    check(*problem(1, 1, 1, 9, 20, 32, 5, device=device), scale=-0.3)


def test_gradients_are_deterministic(device):
    q, k, v, index = problem(1, 4, 1, 150, 60, 32, 9, device=device)

    def grads():
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, _ = kernels.gathered_attention(*leaves, index, scale=0.2)
        return torch.autograd.grad(out.square().sum(), leaves)

    assert all(torch.equal(a, b) for a, b in zip(grads(), grads(), strict=True))


def test_shapes_that_do_not_fit(device):
    q, k, v, index = problem(1, 3, 2, 9, 20, 32, 5, device=device)
    with pytest.raises(ValueError, match="do not fit together"):
        kernels.gathered_attention(q, k, v, index, scale=1.0)
    with pytest.raises(ValueError, match="one dtype"):
        kernels.gathered_attention(q[:, :2].double(), k, v, index, scale=1.0)


@pytest.mark.parametrize(("n", "d"), [(150, 64), (1100, 32)])
def test_top_k_attention(n, d, device):
    q, k, v, _ = problem(1, 4, 2, 30, n, d, 1, device=device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, index = kernels.top_k_attention(*leaves, 16, scale=0.2)
    assert torch.equal(index, reference.top_k(reference.leverage(k.detach()), 16))
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    exact, _ = reference.attention(*exact_leaves, index, scale=0.2)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    exact_grads = torch.autograd.grad(exact.square().sum(), exact_leaves)
    assert relative(out.detach(), exact.detach()) < 2e-6
    assert all(relative(a, b) < 4e-6 for a, b in zip(grads, exact_grads, strict=True))


def test_top_k_attention_with_padding(device):
    q, k, v, _ = problem(2, 2, 2, 12, 40, 32, 1, device=device)
    mask = torch.ones(2, 1, 40, dtype=torch.bool, device=device)
    mask[0, :, 5:] = False
    k[0, :, 5:], v[0, :, 5:] = float("nan"), float("inf")
    out, index = kernels.top_k_attention(q, k, v, 8, scale=0.2, key_mask=mask)
    alone, _ = kernels.top_k_attention(q[:1], k[:1, :, :5], v[:1, :, :5], 5, scale=0.2)
    assert torch.allclose(out[:1], alone, atol=1e-6)
    assert torch.isfinite(out).all()
    assert index.shape == (2, 2, 8)


def test_compile_sees_the_operators(device):
    q, k, v, _ = problem(1, 2, 2, 12, 40, 32, 1, device=device)
    q, k, v = (t.requires_grad_() for t in (q, k, v))

    def step(q, k, v):
        return kernels.top_k_attention(q, k, v, 8, scale=0.2)[0].square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v), [q, k, v])
    exact = torch.autograd.grad(step(q, k, v), [q, k, v])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, exact, strict=True))


def test_operators_are_well_formed(device, monkeypatch):
    monkeypatch.undo()
    q, k, v, index = problem(1, 2, 1, 9, 20, 32, 5, device=device)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    kernels.gathered_attention(q, k, v, index, scale=0.2)
    torch.library.opcheck(torch.ops.levattention.gathered_attention.default, (q, k, v, index, None, None, 0.2))
    keys = k.detach()
    torch.library.opcheck(torch.ops.levattention.gram.default, (keys, None, False, torch.float32))
    p = kernels.whiten(kernels.gram(keys))
    torch.library.opcheck(torch.ops.levattention.whiten.default, (kernels.gram(keys), 1e-5))
    torch.library.opcheck(torch.ops.levattention.leverage.default, (keys, p, None))
    torch.library.opcheck(torch.ops.levattention.top_k.default, (kernels.leverage(keys, p), 4))
    kernels.short_top_k(keys, 4)
    torch.library.opcheck(torch.ops.levattention.short_top_k.default, (keys, p, 4, None))
