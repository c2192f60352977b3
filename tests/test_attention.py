"""`attend` against dense matrices of weights: every option, pairs of options, gradients, dtypes and odd sizes."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dense
import levattention as la
import strategies
from levattention import arguments
from levattention.losses import Power
from levattention.residuals import Sample


def inputs(b=2, h=3, hkv=None, m=21, n=21, d=5, e=None, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hkv = h if hkv is None else hkv
    q = torch.randn(b, h, m, d, generator=generator, dtype=torch.float64)
    k = torch.randn(b, hkv, n, d, generator=generator, dtype=torch.float64)
    v = torch.randn(b, hkv, n, e or d, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def padding(b, hkv, n, form):
    """A mask in one of the documented forms, and the same as (b, hkv, n)."""
    generator = torch.Generator().manual_seed(7)
    heads = {"none": 1, "batch": 1, "one": 1, "heads": hkv}[form]
    mask = torch.rand(b, heads, n, generator=generator) < 0.7
    mask[..., 3] = True
    if form == "none":
        return None, torch.ones(b, hkv, n, dtype=torch.bool)
    return (mask[:, 0] if form == "batch" else mask), mask.expand(b, hkv, n)


def chosen_weights(k, mask, m, *, top_k=None, eps=None, near=None):
    """0/1 weights (b, hkv, m, n): the universal keys of each head and the local ones, among the visible."""
    b, hkv, n, _ = k.shape
    weights = torch.zeros(b, hkv, m, n, dtype=torch.float64)
    for i, j in itertools.product(range(b), range(hkv)):
        if top_k is not None:
            kept = dense.top_leverage(k[i, j].detach(), mask[i, j], top_k)
        else:
            kept = dense.above_leverage(k[i, j].detach(), mask[i, j], eps)
        weights[i, j, :, kept] = 1
    if near is not None:
        weights = torch.where(near, 1.0, weights)
    return weights * mask.unsqueeze(-2)


def same_with_gradients(got, want, tensors, tol=1e-10):
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)
    pull = torch.randn(got.shape, generator=torch.Generator().manual_seed(3), dtype=got.dtype)
    ours = torch.autograd.grad((got * pull).sum(), tensors, retain_graph=True)
    theirs = torch.autograd.grad((want * pull).sum(), tensors)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


SHAPES = {"square": (21, 21), "more keys": (1, 37), "more queries": (29, 13)}
WINDOWS = {"no window": 0, "window": 2, "wide window": 50}
LOSSES = {"softmax": None, "p2": Power(2), "p3": Power(3)}


@pytest.mark.parametrize("budget", [{"top_k": 6}, {"eps": 0.35}], ids=["top_k", "eps"])
@pytest.mark.parametrize("groups", [1, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("form", ["none", "batch", "one", "heads"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_dense_masked_reference(budget, groups, form, window, shape):
    (m, n), hkv = SHAPES[shape], 2
    q, k, v = inputs(h=hkv * groups, hkv=hkv, m=m, n=n, e=7)
    given, mask = padding(2, hkv, n, form)
    weights = chosen_weights(k, mask, m, near=dense.local(m, n, WINDOWS[window]), **budget)
    wide_k, wide_v, wide = (x.repeat_interleave(groups, 1) for x in (k, v, weights))
    for loss in LOSSES.values():
        scale = 1.0 if loss is not None else 1 / math.sqrt(5)
        want = dense.attention(q, wide_k, wide_v, wide, scale, loss)
        # The default scorer of p = 3 is not the leverage that the reference follows.
        got = la.attend(
            q, k, v, loss=loss, key_mask=given, window=WINDOWS[window], enable_gqa=groups > 1,
            scorer=la.scorers.Leverage(), **budget,
        )  # fmt: skip
        same_with_gradients(got, want, (q, k, v))


@pytest.mark.parametrize("radius", [0, 1, 3])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_grid_windows(radius, prefix):
    n = 5 * 7 + prefix
    q, k, v = inputs(m=n, n=n)
    near = dense.manhattan(5, 7, radius, prefix)
    weights = chosen_weights(k, torch.ones(2, 3, n, dtype=torch.bool), n, top_k=4, near=near)
    got = la.attend(q, k, v, top_k=4, window=la.Grid(5, 7, radius, prefix=prefix))
    same_with_gradients(got, dense.attention(q, k, v, weights, 5**-0.5), (q, k, v))


def test_windows_wider_than_a_block_of_queries():
    q, k, v = inputs(b=1, h=1, m=700, n=700)
    for radius in (3, 300):
        weights = chosen_weights(
            k, torch.ones(1, 1, 700, dtype=torch.bool), 700, top_k=5, near=dense.local(700, 700, radius)
        )
        got = la.attend(q, k, v, top_k=5, window=radius)
        same_with_gradients(got, dense.attention(q, k, v, weights, 5**-0.5), (q, k, v))


@pytest.mark.parametrize("name", ["norm", "random"])
def test_scorers_choose_what_they_score_best(name):
    scorer = {"norm": la.scorers.Norm(), "random": la.scorers.Random(3)}[name]
    q, k, v = inputs()
    given, mask = padding(2, 3, 21, "batch")
    got, used = la.attend(q, k, v, top_k=5, scorer=scorer, key_mask=given, return_set=True)
    scores = scorer(k.detach())
    weights = torch.zeros(2, 3, 21, 21, dtype=torch.float64)
    for i, j in itertools.product(range(2), range(3)):
        visible = mask[i, j].nonzero().squeeze(-1)
        kept = visible[dense.best(scores[i, j][visible], 5)]
        weights[i, j][:, kept] = 1
        assert set(used.index[i, j][used.valid[i, j]].tolist()) == set(kept.tolist())
    same_with_gradients(got, dense.attention(q, k, v, weights, 5**-0.5), (q, k, v))
    assert used.eps.isnan().all()


def test_any_callable_scorer_will_do():
    class Last:
        certified = False

        def __call__(self, keys):
            return torch.arange(keys.shape[-2], dtype=torch.float64).expand(keys.shape[:-1])

    q, k, v = inputs()
    want = scaled_dot_product_attention(q, k[..., -4:, :], v[..., -4:, :])
    torch.testing.assert_close(la.attend(q, k, v, top_k=4, scorer=Last()), want)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_exact_normaliser_sums_over_all_visible_keys(p, window, groups):
    q, k, v = inputs(h=4, hkv=4 // groups, n=33)
    given, mask = padding(2, 4 // groups, 33, "batch")
    weights = chosen_weights(k, mask, 21, top_k=6, near=dense.local(21, 33, window))
    wide_k, wide_v, wide, wide_mask = (x.repeat_interleave(groups, 1) for x in (k, v, weights, mask))
    total = ((q @ wide_k.mT).abs() ** p * wide_mask.unsqueeze(-2)).sum(-1)
    want = dense.attention(q, wide_k, wide_v, wide, 1.0, Power(p), total)
    got = la.attend(
        q, k, v, top_k=6, loss=Power(p), normaliser="exact", key_mask=given, window=window, enable_gqa=groups > 1,
        scorer=la.scorers.Leverage(),
    )  # fmt: skip
    same_with_gradients(got, want, (q, k, v))


def test_the_exact_normaliser_leaves_the_true_attention_weights():
    """With e = n one-hot values, the output holds the weights themselves: those of full attention, cut to U."""
    q, k, _ = inputs(n=30)
    v = torch.eye(30, dtype=torch.float64).expand(2, 3, 30, 30)
    got, used = la.attend(q, k, v, eps=0.3, loss=Power(2), normaliser="exact", return_set=True)
    full = (q @ k.mT).square()
    full = full / full.sum(-1, keepdim=True)
    torch.testing.assert_close(got, full * used.mask(30).unsqueeze(-2))
    assert (full * ~used.mask(30).unsqueeze(-2)).max() < 0.3


@pytest.mark.parametrize("make", [strategies.heavy_tailed, strategies.spikes], ids=["heavy-tailed", "spikes"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_hard_keys(make, scale):
    k = (make(60, 6) * scale)[None, None]
    q, _, v = inputs(b=1, h=1, m=9, n=60, d=6)
    weights = chosen_weights(k, torch.ones(1, 1, 60, dtype=torch.bool), 9, top_k=10)
    for loss in (None, Power(4)):
        got = la.attend(q, k, v, top_k=10, loss=loss, scale=0.1, scorer=la.scorers.Leverage())
        torch.testing.assert_close(got, dense.attention(q, k, v, weights, 0.1, loss), rtol=1e-7, atol=1e-9)


def test_rank_deficient_duplicate_and_zero_keys():
    k = strategies.deficient(40, 6, 3)
    k[5] = 0
    k[7:12] = k[7]
    k = k[None, None]
    q, _, v = inputs(b=1, h=1, m=9, n=40, d=6)
    weights = chosen_weights(k, torch.ones(1, 1, 40, dtype=torch.bool), 9, top_k=8)
    torch.testing.assert_close(la.attend(q, k, v, top_k=8), dense.attention(q, k, v, weights, 6**-0.5))


def test_equal_scores_go_to_the_earlier_key():
    k = torch.eye(4, dtype=torch.float64).repeat(6, 1)[None, None]
    q, _, v = inputs(b=1, h=1, m=5, n=24, d=4)
    _, used = la.attend(q, k, v, top_k=7, return_set=True)
    assert sorted(used.index[0, 0].tolist()) == list(range(7))
    assert float(used.eps) == pytest.approx(1 / 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [21, 13, 40])
@pytest.mark.parametrize("form", ["none", "heads"])
def test_enough_keys_is_sdpa_itself(dtype, groups, causal, n, form):
    q, k, v = (x.detach() for x in inputs(h=6, hkv=6 // groups, n=n, dtype=dtype))
    given, mask = padding(2, 6 // groups, n, form)
    seen = mask.repeat_interleave(groups, 1).unsqueeze(-2).expand(2, 6, 21, n)
    if causal:
        seen = seen & torch.ones(21, n, dtype=torch.bool).tril(n - 21)
    want = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    want = torch.where(seen.any(-1, keepdim=True), want, 0)
    got = la.attend(q, k, v, top_k=n, key_mask=given, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(got, want)
    # One key short of n, or n keys by eps: no longer PyTorch's kernel, and the same up to rounding.
    if not causal and form == "none":
        again = la.attend(q, k, v, eps=1e-9, enable_gqa=True)
        torch.testing.assert_close(again, want, rtol=2e-2, atol=2e-2) if dtype.itemsize == 2 else None
        torch.testing.assert_close(again, want) if dtype.itemsize > 2 else None


@pytest.mark.parametrize("loss", [None, Power(2)])
@pytest.mark.parametrize("options", [{"top_k": 4}, {"top_k": 50}, {"eps": 0.2}, {"top_k": 4, "window": 2}])
@pytest.mark.parametrize("causal", [False, True])
def test_masked_keys_may_hold_anything_and_a_fully_masked_row_is_zero(loss, options, causal):
    q, k, v = (x.detach() for x in inputs())
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, 11:] = False
    mask[1] = False
    clean = la.attend(q, k, v, key_mask=mask, is_causal=causal, loss=loss, **options)
    k[0, :, 11:], v[0, :, 11:], k[1], v[1] = torch.nan, torch.inf, torch.inf, torch.nan
    tensors = [x.requires_grad_() for x in (q, k, v)]
    got = la.attend(*tensors, key_mask=mask, is_causal=causal, loss=loss, **options)
    assert torch.equal(got, clean)
    assert not got[1].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), tensors))


def test_padding_does_not_change_what_the_rest_sees():
    q, k, v = (x.detach() for x in inputs())
    longer_k, longer_v = (torch.cat([x, torch.randn_like(x)], -2) for x in (k, v))
    mask = torch.arange(42).expand(2, 42) < 21
    for options in ({"top_k": 6}, {"eps": 0.3}, {"top_k": 8, "residual": la.residuals.Sample()}):
        alone, set_alone = la.attend(q, k, v, return_set=True, **options)
        padded, set_padded = la.attend(q, longer_k, longer_v, key_mask=mask, return_set=True, **options)
        torch.testing.assert_close(alone, padded)
        assert torch.equal(set_alone.mask(21), set_padded.mask(42)[..., :21])


def test_a_set_can_be_reused():
    q, k, v = inputs()
    out, used = la.attend(q, k, v, top_k=6, return_set=True)
    again, same = la.attend(q, k, v, universal=used, return_set=True)
    assert torch.equal(out, again)
    assert torch.equal(used.index, same.index)
    from_keys = la.universal_set(k.detach(), k=6)
    assert torch.equal(la.attend(q, k, v, universal=from_keys), out)
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[:, used.index[0, 0, 0]] = False
    masked = la.attend(q, k, v, universal=used, key_mask=mask)
    weights = (used.mask(21) & mask.unsqueeze(1)).double().unsqueeze(-2).expand(2, 3, 21, 21)
    torch.testing.assert_close(masked, dense.attention(q, k, v, weights, 5**-0.5))


def test_unbatched_and_deeply_batched_inputs():
    q, k, v = (x.detach() for x in inputs())
    whole = la.attend(q, k, v, top_k=5)
    torch.testing.assert_close(la.attend(q[1, 2], k[1, 2], v[1, 2], top_k=5), whole[1, 2])
    torch.testing.assert_close(la.attend(q[1], k[1], v[1], top_k=5), whole[1])
    torch.testing.assert_close(la.attend(q[None], k[None], v[None], top_k=5), whole[None])
    assert la.attend(q[0, 0], k[0, 0], v[0, 0], top_k=50).shape == (21, 5)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 4},
        {"eps": 0.4},
        {"top_k": 4, "window": 2},
        {"top_k": 4, "is_causal": True, "chunk": 3},
        {"top_k": 4, "loss": Power(2)},
        {"top_k": 4, "loss": Power(4), "normaliser": "exact", "scorer": la.scorers.Leverage()},
        {"top_k": 4, "residual": Sample()},
        {"top_k": 4, "residual": la.residuals.Cluster()},
        {"top_k": 4, "residual": la.residuals.Cluster(heavy=0.25), "window": 1},
    ],
    ids=str,
)
def test_gradcheck(options):
    q, k, v = inputs(b=1, h=2, hkv=1, m=7, n=7, d=3)
    mask = torch.ones(1, 7, dtype=torch.bool)
    mask[0, 2] = False
    assert torch.autograd.gradcheck(
        lambda *x: la.attend(*x, key_mask=mask, enable_gqa=True, **options), (q, k, v), atol=1e-6
    )


def test_gradients_reach_only_the_keys_that_were_used():
    q, k, v = inputs()
    out, used = la.attend(q, k, v, top_k=6, return_set=True)
    for grad in torch.autograd.grad(out.square().sum(), (k, v)):
        assert torch.equal(grad.abs().sum(-1) > 0, used.mask(21))


@pytest.mark.parametrize("size", [1.0, 200.0, 3e4])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_has_no_nan(size, causal):
    q, k, v = inputs(m=50, n=50, d=16, dtype=torch.float16)
    q, k = (x.detach().mul(size).clamp(-6e4, 6e4).requires_grad_() for x in (q, k))
    for options in ({"top_k": 8}, {"top_k": 8, "window": 3}, {"eps": 0.4}, {"top_k": 8, "loss": Power(4)}):
        options = {"scorer": la.scorers.Leverage(), **options}
        out = la.attend(q, k, v, is_causal=causal, **options)
        assert out.dtype == torch.float16
        assert out.isfinite().all()
    grads = torch.autograd.grad(la.attend(q, k, v, top_k=8, is_causal=causal).float().sum(), (q, k, v))
    assert not any(g.isnan().any() for g in grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_error_is_that_of_the_output_alone(dtype):
    q, k, v = (x.detach() for x in inputs(m=64, n=64, d=16, dtype=dtype))
    wide, used = la.attend(q.double(), k.double(), v.double(), top_k=16, return_set=True)
    got = la.attend(q, k, v, universal=used)
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "options", [{"top_k": 8}, {"top_k": 64}, {"top_k": 8, "window": 2}, {"top_k": 8, "is_causal": True}]
)
def test_autocast_works_in_its_own_dtype(options):
    q, k, v = inputs(m=40, n=40, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = la.attend(q, k, v, **options)
        assert out.dtype == scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    torch.testing.assert_close(out, la.attend(*(x.bfloat16() for x in (q, k, v)), **options))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), (q, k, v)))


def test_dropout_drops_weights_and_keeps_the_mean():
    q, k, _ = (x.detach() for x in inputs(b=1, h=1, m=2000, n=12))
    v = torch.ones(1, 1, 12, 1, dtype=torch.float64)
    torch.manual_seed(0)
    out = la.attend(q, k, v, top_k=8, dropout_p=0.5, window=1)
    # Each output is Σ 2·wᵢ·Bernoulli(½) with mean 1 and variance Σw² ≤ 1: five standard errors of 2000 draws.
    assert abs(float(out.mean()) - 1) < 5 / math.sqrt(2000)
    assert out.std() > 0.1


COMPILE = """
    import torch, levattention as la
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 48, 8).requires_grad_() for h in (4, 2, 2))
    mask = torch.rand(2, 48) < 0.8
    def check(call, backend):
        torch.compiler.reset()
        fast = torch.compile(call, fullgraph=True, backend=backend)
        a, b = call(q, k, v), fast(q, k, v)
        torch.testing.assert_close(a, b)
        for x, y in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (a, b))):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    def both(*x):
        return la.attend(*x, enable_gqa=True, top_k=6) + la.attend(*x, enable_gqa=True, eps=0.3)
    check(both, "inductor")
    for options in (
        {"top_k": 6, "window": 3}, {"top_k": 6, "is_causal": True, "chunk": 20}, {"eps": 0.3, "is_causal": True},
        {"top_k": 6, "residual": la.residuals.Cluster()}, {"top_k": 6, "residual": la.residuals.Sample()},
        {"top_k": 6, "loss": la.Power(2), "normaliser": "exact"}, {"top_k": 99},
        {"top_k": 6, "is_causal": True, "chunk": 20, "scorer": la.scorers.Norm()},
        {"eps": 0.3, "is_causal": True, "chunk": 20, "scorer": la.scorers.Lewis(3)},
    ):
        check(lambda *x: la.attend(*x, enable_gqa=True, key_mask=mask, **options), "aot_eager")
    print("compiled")
"""

COMPILE_LENGTHS = """
    import torch, levattention as la
    for options in (
        {"top_k": 3, "window": 2}, {"eps": 0.3, "is_causal": True, "chunk": 9},
        {"top_k": 3, "residual": la.residuals.Cluster(groups=2, tangents=1)},
    ):
        torch.compiler.reset()
        call = lambda q: la.attend(q, q, q, **options)
        fast = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
        for n in (10, 17):
            q = torch.randn(2, 3, n, 4)
            torch.testing.assert_close(fast(q), call(q))
    print("compiled")
"""

COMPILE_MODEL = """
    import itertools, torch, levattention as la
    from transformers import ViTConfig, ViTForImageClassification
    from levattention.integrations.huggingface import use_lev_attention
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8))
    pixels = torch.randn(2, 3, 32, 32)
    def run(call, bf16):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = call(pixel_values=pixels).logits.float()
        return [logits, *torch.autograd.grad(logits.square().sum(), model.parameters())]
    scorers = la.scorers.Leverage(), la.scorers.Norm(), la.scorers.Random(3), la.scorers.Lewis(3)
    residuals = la.residuals.Drop(), la.residuals.Sample(seed=5), la.residuals.Cluster(heavy=0.25)
    for i, (scorer, residual) in enumerate(itertools.product(scorers, residuals)):
        use_lev_attention(model, top_k=6, scorer=scorer, residual=residual)
        torch.compiler.reset()
        fast = torch.compile(model, fullgraph=True, backend="aot_eager")
        bf16, tolerance = (True, 0.05) if i % 2 else (False, 1e-4)
        for x, y in zip(run(model, bf16), run(fast, bf16)):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    print("compiled")
"""


@pytest.mark.parametrize("script", [COMPILE, COMPILE_LENGTHS, COMPILE_MODEL], ids=["attend", "lengths", "model"])
def test_compiles_as_one_graph(script):
    """In a fresh interpreter: the shape checks that these tests switch on are no part of the package."""
    if script is COMPILE_MODEL:
        pytest.importorskip("transformers", reason="transformers is not installed")
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]


BAD = {
    "no budget": ({}, "exactly one of top_k, eps and universal, got none"),
    "two budgets": ({"top_k": 3, "eps": 0.1}, "got top_k=3 and eps=0.1"),
    "zero top_k": ({"top_k": 0}, "positive integer, got 0"),
    "negative top_k": ({"top_k": -1}, "positive integer, got -1"),
    "eps": ({"eps": 1.5}, r"\(0, 1\]"),
    "eps of norms": ({"eps": 0.1, "scorer": la.scorers.Norm()}, "certify no threshold"),
    "window": ({"top_k": 3, "window": -1}, "integer >= 0 or a Grid"),
    "grid": ({"top_k": 3, "window": la.Grid(4, 4, 1)}, "is for 16 queries and keys, got 21 queries and 21 keys"),
    "float mask": ({"top_k": 3, "key_mask": torch.zeros(2, 21)}, "boolean tensor"),
    "mask a query": ({"top_k": 3, "key_mask": torch.ones(2, 3, 21, 21, dtype=torch.bool)}, "key_mask: expected"),
    "short mask": ({"top_k": 3, "key_mask": torch.ones(2, 20, dtype=torch.bool)}, r"got \(2, 20\)"),
    "residual and eps": ({"eps": 0.1, "residual": Sample()}, "give top_k instead of eps"),
    "causal residual": ({"top_k": 3, "residual": Sample(), "is_causal": True}, "takes Drop"),
    "clusters of a loss": ({"top_k": 3, "residual": la.residuals.Cluster(), "loss": Power(2)}, "sums exponentials"),
    "normaliser of softmax": ({"top_k": 3, "normaliser": "exact"}, "even powers"),
    "normaliser of odd p": (
        {"top_k": 3, "normaliser": "exact", "loss": Power(3), "scorer": la.scorers.Leverage()}, "even powers"),
    "chunk": ({"top_k": 3, "is_causal": True, "chunk": 0}, "chunk"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_options_say_what_was_expected(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        la.attend(*inputs(), **options)


def test_bad_types_say_what_came():
    """Called directly: on `attend` itself the tests' own type checks come first."""
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"positive integer, got 2\.5"):
        arguments.require_choice(2.5, None, None, None, None)
    with pytest.raises(ValueError, match="None or 'exact'"):
        arguments.require_normaliser("sketched", Power(2), False, la.residuals.Drop())
    with pytest.raises(ValueError, match=r"q: .* got list"):
        arguments.require_shapes(*arguments.autocast(q.tolist(), k, v), False)


def test_bad_shapes_say_what_came():
    q, k, v = inputs()
    for tensors, message in [
        ((q, k[:, :2], v[:, :2]), "as many query heads"),
        ((q, k, v[..., :20, :]), "as many values as keys"),
        ((q, k[..., :4], v), "one width"),
        ((q[:1], k, v), "same leading dimensions"),
        ((q, k, v.float()), "one dtype"),
        ((q.long(), k, v), "q: expected an fp16"),
        ((q, k[..., :0, :], v[..., :0, :]), "non-empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            la.attend(*tensors, top_k=3)
    with pytest.raises(ValueError, match="multiple of the 2 key heads, got 3"):
        la.attend(q, k[:, :2], v[:, :2], top_k=3, enable_gqa=True)
    _, used = la.attend(q, k, v, top_k=3, return_set=True)
    with pytest.raises(ValueError, match="universal: expected leading dimensions"):
        la.attend(q[0], k[0], v[0], universal=used)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation gives back."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            # Views and broadcast tensors take no memory of their own.
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 8},
        {"eps": 0.5},
        {"top_k": 8, "window": 5},
        {"top_k": 8, "is_causal": True},
        {"eps": 0.5, "is_causal": True, "window": 20},
        {"top_k": 8, "residual": Sample()},
        {"top_k": 8, "residual": la.residuals.Cluster()},
        {"top_k": 8, "loss": Power(2), "normaliser": "exact"},
    ],
    ids=str,
)
def test_no_tensor_grows_faster_than_the_sequence(options):
    """Forward and backward; an n × n matrix would grow 16-fold from 1,024 to 4,096 tokens."""
    sizes = []
    for n in (1024, 4096):
        q, k, v = inputs(b=1, h=1, m=n, n=n, d=4)
        with Largest() as largest:
            la.attend(q, k, v, **options).sum().backward()
        sizes.append(largest.elements)
    assert sizes[1] <= 4.1 * sizes[0]
    assert sizes[1] < 4096 * 4096 // 8
