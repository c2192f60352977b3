"""`attend`, `Gram` and the selection reach the kernels by themselves, and give what the plain route gives."""

import subprocess
import sys
import textwrap

import pytest
import torch

import levattention as la
from levattention import kernels
from levattention.residuals import Cluster, Sample

RESIDUALS = {"drop": {}, "cluster": {"residual": Cluster(heavy=0.25)}, "sample": {"residual": Sample()}}


@pytest.fixture
def routes(monkeypatch, device):
    """Run a call by the kernels and by plain torch, and say which kernels the first one launched."""

    def run(call):
        seen = set()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "preferred", kernels.supported)
            for name in ("select", "gathered_attention", "ranked", "gram", "causal_attention", "running_top_k"):
                plain = getattr(kernels, name)

                def spy(*args, _plain=plain, _name=name, **options):
                    seen.add(_name)
                    return _plain(*args, **options)

                patch.setattr(kernels, name, spy)
            ours = call()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "preferred", lambda tensor: False)
            return ours, call(), seen

    return run


def heads(device, dtype=torch.float32, groups=1, n=70, d=32):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 2 * groups, n, d, generator=generator)
    k, v = torch.randn(2, 2, 2, n, d, generator=generator)
    # A wide spread of scores, so that rounding swaps no two keys.
    k = k * torch.linspace(0.2, 3, n).unsqueeze(-1)
    return [t.to(device, dtype).requires_grad_() for t in (q, k, v)]


def attended(leaves, **options):
    out = la.attend(*leaves, **options)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed)]


def close(ours, plain, bound=1e-5):
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).double().norm() <= bound * b.double().norm()


@pytest.mark.parametrize("name", RESIDUALS)
@pytest.mark.parametrize("groups", [1, 3])
def test_forward_and_gradients(name, groups, routes, device):
    leaves = heads(device, groups=groups)
    ours, plain, seen = routes(lambda: attended(leaves, top_k=12, enable_gqa=groups > 1, **RESIDUALS[name]))
    # Where nothing but the positions is needed, nothing else is kept.
    assert seen == {"gathered_attention", "select" if name == "drop" else "ranked"}
    close(ours, plain)


def test_half_precision(routes, device):
    leaves = heads(device, torch.bfloat16)
    ours, plain, seen = routes(lambda: attended(leaves, top_k=12))
    assert "gathered_attention" in seen
    close(ours, plain, 2e-2)


@pytest.mark.parametrize("name", ["drop", "cluster"])
def test_padding_may_hold_anything(name, routes, device):
    leaves = heads(device)
    mask = torch.ones(2, 70, dtype=torch.bool, device=device)
    mask[0, 5:] = False
    with torch.no_grad():
        leaves[1][0, :, 5:] = float("nan")
        leaves[2][0, :, 5:] = float("inf")
    ours, plain, seen = routes(lambda: attended(leaves, top_k=9, key_mask=mask, **RESIDUALS[name]))
    assert "gathered_attention" in seen
    assert all(torch.isfinite(x).all() for x in ours)
    close(ours, plain)


@pytest.mark.parametrize(
    ("groups", "m", "options"),
    [
        (1, 31, {"chunk": 16}),  # keys before the first query
        (2, 70, {"chunk": 30, "window": 40}),
    ],
)
def test_causal(groups, m, options, routes, device):
    q, k, v = heads(device, groups=groups, d=5)
    leaves = [q[:, :, -m:].detach().requires_grad_(), k, v]
    ours, plain, seen = routes(lambda: attended(leaves, top_k=12, enable_gqa=True, is_causal=True, **options))
    assert seen == {"causal_attention", "running_top_k"}
    close(ours, plain)


def test_causal_padding_may_hold_anything(routes, device):
    leaves = heads(device, d=5)
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(1)).to(device) > 0.3
    mask[0, :30] = False
    with torch.no_grad():
        leaves[1].masked_fill_(~mask[:, None, :, None], float("nan"))
        leaves[2].masked_fill_(~mask[:, None, :, None], float("inf"))
    ours, plain, seen = routes(lambda: attended(leaves, top_k=9, key_mask=mask, is_causal=True, chunk=20, window=3))
    assert "causal_attention" in seen
    assert all(torch.isfinite(x).all() for x in ours)
    assert not ours[0][0, :, :30].any()
    close(ours, plain)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, under the interpreter
@pytest.mark.parametrize(("n", "d"), [(70, 5), (70, 60), (1100, 100)])
def test_nan_or_inf_in_a_visible_key_is_not_passed_over(n, d, monkeypatch, device):
    monkeypatch.setattr(kernels, "preferred", kernels.supported)
    q, k, v = (x.detach() for x in heads(device, n=n, d=d))
    k[0, 1, 20, d - 1], k[1, 0, 30, 0] = float("nan"), float("inf")
    assert (kernels.select(k, 9)[1, 0] == 30).any()
    out = la.attend(q, k, v, top_k=9)
    assert out[0, 1].isnan().all()
    out[0, 1] = out[1, 0] = 0
    assert out.isfinite().all()


def test_causal_in_half_precision_over_a_given_set(routes, device):
    leaves = heads(device, torch.bfloat16)
    given = la.universal_set(leaves[1].detach(), k=20)
    options = {"universal": given, "is_causal": True, "chunk": 16, "window": 2}
    ours, plain, seen = routes(lambda: attended(leaves, **options))
    assert seen == {"causal_attention"}
    close(ours, plain, 2e-2)


@pytest.mark.parametrize("options", [{"top_k": 9, "return_set": True}, {"eps": 0.4}], ids=str)
def test_causal_sets_that_are_certified_take_the_plain_route(options, routes, device):
    leaves = heads(device)
    *_, seen = routes(lambda: la.attend(*leaves, is_causal=True, chunk=16, **options))
    assert "causal_attention" not in seen


def test_more_queries_than_keys_take_the_plain_route(routes, device):
    q, k, v = heads(device, d=5)
    ours, plain, seen = routes(lambda: la.attend(q, k[:, :, :50], v[:, :, :50], top_k=9, is_causal=True, chunk=16))
    assert "causal_attention" not in seen
    close([ours], [plain])


def test_a_returned_set_is_certified_and_reused(routes, device):
    q, k, v = heads(device)
    ours, plain, seen = routes(lambda: la.attend(q, k, v, top_k=9, return_set=True))
    assert seen >= {"gathered_attention", "ranked", "gram"}
    (out, found), (_, expected) = ours, plain
    assert torch.equal(found.index, expected.index)
    assert torch.allclose(found.scores, expected.scores, rtol=1e-12)
    assert torch.allclose(found.eps, expected.eps, rtol=1e-12)
    again, plainly, seen = routes(lambda: la.attend(q, k, v, universal=found))
    assert seen == {"gathered_attention"}
    close([again, again], [out, plainly])


def test_a_threshold_takes_the_certified_scores(routes, device):
    leaves = heads(device)
    ours, plain, seen = routes(lambda: attended(leaves, eps=0.6))
    assert seen == {"gathered_attention", "gram"}
    close(ours, plain)


def test_a_head_that_sees_no_key_gives_zeros(routes, device):
    leaves = heads(device)
    mask = torch.ones(2, 70, dtype=torch.bool, device=device)
    mask[1] = False
    ours, _, seen = routes(lambda: attended(leaves, top_k=9, key_mask=mask))
    assert "gathered_attention" in seen
    assert not any(x[1].any() for x in ours)
    assert ours[0][0].any()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 3},
        {"loss": la.Power(4), "scorer": la.scorers.Leverage()},
        {"top_k": 70},
        {"is_causal": True, "window": la.Grid(7, 10, 1)},
        {"is_causal": True, "scorer": la.scorers.Norm()},
    ],
    ids=str,
)
def test_what_the_kernels_do_not_do_takes_the_plain_route(options, routes, device):
    leaves = heads(device)
    ours, plain, seen = routes(lambda: attended(leaves, **({"top_k": 9} | options)))
    assert not seen & {"gathered_attention", "causal_attention"}
    close(ours, plain)


def test_other_types_and_widths_take_the_plain_route(routes, device):
    q, k, v = (t.detach() for t in heads(device))
    for call in (
        lambda: la.attend(q.double(), k.double(), v.double(), top_k=9),
        lambda: la.attend(q, k, v[..., :16], top_k=9),
        lambda: la.attend(q[0], k[0], v[0], top_k=9),
    ):
        ours, plain, seen = routes(call)
        assert "gathered_attention" not in seen
        close([ours], [plain])


def test_gram_takes_the_precise_kernel(routes, device):
    keys = heads(device, n=301)[1].detach()
    ours, plain, seen = routes(lambda: la.Gram.of(keys))
    assert seen == {"gram"}
    assert (ours.count, ours.input_eps) == (plain.count, plain.input_eps)
    close([ours.matrix], [plain.matrix], 1e-15)
    steps = []
    routes(lambda: la.Gram.of(keys, advance=steps.append))
    assert sum(steps[:1]) == sum(steps[1:]) == keys.numel() // keys.shape[-1]


COMPILE = """
    import sys
    import torch
    sys.path.insert(0, "tests")
    import interpreter
    interpreter.prepare()
    import levattention as la
    from levattention import kernels
    from levattention.residuals import Cluster
    if not torch.cuda.is_available():
        kernels.preferred = lambda tensor: True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leaves = [torch.randn(2, 2, 40, 32, device=device).requires_grad_() for _ in range(3)]
    for options in ({}, {"residual": Cluster(heavy=0.25)}, {"is_causal": True, "chunk": 10, "window": 3}):
        def step(q, k, v):
            return la.attend(q, k, v, top_k=8, **options).square().sum()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        ours, plain = (torch.autograd.grad(run(*leaves), leaves) for run in (compiled, step))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, plain))
    graph = torch._dynamo.export(lambda q, k, v: la.attend(q, k, v, top_k=8))(*leaves).graph_module.code
    assert "levattention.gathered_attention" in graph and "levattention.short_top_k" in graph, graph
    print("compiled")
"""


def test_compiles_as_one_graph_of_the_kernels():
    """In a fresh interpreter: the shape checks that these tests switch on are no part of the package."""
    script = textwrap.dedent(COMPILE)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]


def test_a_second_derivative_is_refused(device):
    q, k, v = heads(device)
    index = torch.arange(5, device=device).expand(2, 2, 5)
    out, _ = kernels.gathered_attention(q, k, v, index, scale=0.2)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    out, _ = kernels.causal_attention(q, k, v, index.unsqueeze(2), index.unsqueeze(2) > 0, chunk=16, scale=0.2)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
