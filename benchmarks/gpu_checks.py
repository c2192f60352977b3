"""Every kernel against fp64: selection, attention over its set, causal attention; forward and gradients.

What a fresh tensor holds is poisoned while the kernels run, so that an element that none of them wrote is seen.
"""

import sys
import traceback
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "kernels")]

if not torch.cuda.is_available():
    import interpreter

    interpreter.prepare()

import reference  # noqa: E402
from levattention import kernels  # noqa: E402
from levattention.causal import RunningSet  # noqa: E402
from levattention.scorers import Leverage  # noqa: E402
from levattention.select import Choice  # noqa: E402
from poison import poisoned  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = {
    "set": [  # B, Hq, Hkv, m, n, d, k
        (2, 4, 2, 197, 197, 64, 32),
        (1, 2, 2, 301, 785, 64, 40),
        (1, 4, 1, 77, 1501, 128, 128),
        (1, 2, 2, 1500, 1500, 128, 100),
        (1, 2, 2, 333, 1333, 80, 130),
        (1, 2, 1, 130, 1300, 32, 5),
        (1, 1, 1, 257, 1100, 96, 64),
        (1, 1, 1, 100, 600, 256, 70),
    ],
    "causal": [  # B, Hq, Hkv, m, n, d, k, chunk, reach
        (2, 2, 1, 700, 700, 64, 40, 256, 0),
        (1, 2, 2, 500, 901, 128, 130, 130, 300),
        (1, 2, 1, 333, 1333, 80, 20, 64, 17),
        (1, 1, 1, 600, 600, 256, 64, 300, 100),
        (1, 1, 1, 301, 785, 32, 5, 7, 20),
    ],
}
# For a run without a GPU, under Triton's interpreter.
TINY = {"set": [(1, 2, 1, 20, 40, 16, 5)], "causal": [(1, 2, 1, 60, 90, 16, 5, 20, 7)]}
# How far selection may be from fp64; `order` and `missed` are shares.
BOUND = {"gram": 3e-6, "precise": 1e-14, "scores": 1e-4, "order": 0.0, "missed": 0.05}


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def gathered(x, index, group):
    rows = index.unsqueeze(-1).expand(*index.shape, x.shape[-1])
    return x.gather(2, rows).repeat_interleave(group, 1)


def with_gradients(attend, leaves, seed, dtype):
    """[out, dq, dk, dv] of `attend` on the leaves in a type."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


def errors(ours, plain, exact, leaves, seed, dtype):
    """Relative errors against fp64 of (out, dq, dk, dv), ours and those of SDPA over the same keys."""
    exact = with_gradients(exact, leaves, seed, torch.float64)
    plain = with_gradients(plain, leaves, seed, dtype)
    with poisoned():
        ours = with_gradients(ours, leaves, seed, dtype)
    found = {"ours": ours, "sdpa": plain}
    return {name: [relative(a, e) for a, e in zip(got, exact, strict=True)] for name, got in found.items()}


def check_set(b, hq, hkv, m, n, d, k, dtype):
    """Errors of selection, and of attention given the same index."""
    q, key, v, seed = (draw(b, h, rows, d, dtype=dtype) for h, rows in ((hq, m), (hkv, n), (hkv, n), (hq, m)))
    scale, group = d**-0.5, hq // hkv
    index = kernels.select(key, k)
    return check_selection(key, k) | errors(
        lambda *x: kernels.gathered_attention(*x, index, scale=scale)[0],
        lambda q, key, v: sdpa(q, gathered(key, index, group), gathered(v, index, group), scale=scale),
        lambda *x: reference.attention(*x, index, scale=scale)[0],
        (q, key, v),
        seed,
        dtype,
    )


def check_selection(key, k):
    """Errors of the Gram matrix, the scores and the order, and the share of the fp64 top k that is not found."""
    exact, exact_gram = reference.leverage(key), reference.gram(key)
    with poisoned():
        gram, precise = kernels.gram(key), kernels.gram(key, precise=True)
        scores = kernels.leverage(key, kernels.whiten(gram))
        index = kernels.top_k(scores, k)
        found = kernels.select(key, k)
    best = reference.top_k(exact, k)
    return {
        "gram": relative(gram, exact_gram),
        "precise": relative(precise, exact_gram),
        "scores": ((scores - exact).abs() / exact).max().item(),
        "order": float(not torch.equal(index, reference.top_k(scores, k))),
        "missed": 1 - (found.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).double().mean().item(),
    }


def check_causal(b, hq, hkv, m, n, d, k, chunk, reach, dtype):
    """Errors of causal attention given the same sets, and the share of the keys in fp64's sets that is not found."""
    q, key, v, seed = (draw(b, h, rows, d, dtype=dtype) for h, rows in ((hq, m), (hkv, n), (hkv, n), (hq, m)))
    scale, group, options = d**-0.5, hq // hkv, {"chunk": chunk, "reach": reach}
    with poisoned():
        index, valid = kernels.running_top_k(key, k, chunk=chunk, first=n - m)
    seen = reference.causal_weights(index, valid, m, n, **options)

    def masked(q, key, v):
        key, v, mask = (x.repeat_interleave(group, 1) for x in (key, v, seen))
        return sdpa(q, key, v, attn_mask=mask, scale=scale)

    return {"missed": missed_by_running_sets(key, index, valid, k, chunk, n - m)} | errors(
        lambda *x: kernels.causal_attention(*x, index, valid, scale=scale, **options)[0],
        masked,
        lambda *x: reference.masked_attention(*x, seen, scale=scale)[0],
        (q, key, v),
        seed,
        dtype,
    )


def missed_by_running_sets(key, index, valid, k, chunk, first):
    """The share of the keys in fp64's sets, over all chunks, that are not in ours."""
    n = key.shape[-2]
    everything = torch.ones(key.shape[:-1], dtype=torch.bool, device=key.device)
    grows = RunningSet(key, everything, Choice(Leverage(), k, None))
    read, found, wanted = 0, 0, 0
    for c, before in enumerate(range(first, n, chunk)):
        if before > read:
            grows.read(read, before)
            read = before
        if grows.chosen is not None:
            exact = grows.chosen.mask(n)
            ours = torch.zeros_like(exact, dtype=torch.int32)
            ours = ours.scatter_add_(-1, index[:, :, c], valid[:, :, c].int()) > 0
            found, wanted = found + int((exact & ours).sum()), wanted + int(exact.sum())
    return 1 - found / wanted


KINDS = {"set": check_set, "causal": check_causal}


def checks(types, shapes):
    """The figures of every check, and whether it "passed"; shapes by kind."""
    figures = []
    for name in types:
        for kind in shapes:
            for shape in shapes[kind]:
                figure = {"kind": kind, "dtype": name, "shape": shape}
                try:
                    figure |= KINDS[kind](*shape, DTYPES[name])
                    figure["passed"] = all(figure[key] <= most for key, most in BOUND.items() if key in figure)
                    figure["passed"] &= all(a <= 2 * p for a, p in zip(figure["ours"], figure["sdpa"], strict=True))
                except Exception as error:
                    traceback.print_exc(limit=3)
                    figure |= {"passed": False, "error": repr(error)[:300]}
                figures.append(figure)
                print(told(figure), flush=True)
    return figures


def told(figure):
    """A line about one check."""
    start = f"{'ok  ' if figure['passed'] else 'FAIL'} {figure['dtype']} {figure['kind']:6s} {figure['shape']!s:40s}"
    if "error" in figure:
        return f"{start} {figure['error']}"
    ratio = max(a / p for a, p in zip(figure["ours"], figure["sdpa"], strict=True))
    rest = ", ".join(f"{name} {figure[name]:.0e}" for name in BOUND if name in figure)
    return f"{start} error {ratio:.2f} of SDPA's, {rest}"


def sanitize(types):
    """Every kernel once on odd little shapes, for compute-sanitizer."""
    for dtype in (DTYPES[name] for name in types):
        for b, hq, hkv, m, n, d, k in ((2, 2, 1, 33, 65, 64, 7), (1, 1, 1, 40, 1030, 80, 130), (1, 1, 1, 9, 9, 32, 3)):
            q, key, v = draw(b, hq, m, d, dtype=dtype), draw(b, hkv, n, d, dtype=dtype), draw(b, hkv, n, d, dtype=dtype)
            leaves = [t.requires_grad_() for t in (q, key, v)]
            mask = torch.ones(b, 1, n, dtype=torch.bool, device=DEVICE)
            mask[..., n - 1 :] = False
            for options in ({}, {"key_mask": mask}):
                out, index = kernels.top_k_attention(*leaves, k, scale=0.1, **options)
                torch.autograd.grad(out.float().sum(), leaves)
            kernels.gram(key.detach(), precise=True)
            bias = torch.zeros(b, hkv, k, device=DEVICE, requires_grad=True)
            out, lse = kernels.gathered_attention(*leaves, index, bias, scale=0.1)
            torch.autograd.grad(out.float().sum() + lse.sum(), [*leaves, bias])
            for options in ({}, {"mask": mask}):
                sets = kernels.running_top_k(key.detach(), k, chunk=7, first=n - m, **options)
                out, lse = kernels.causal_attention(*leaves, *sets, chunk=7, reach=5, scale=0.1, **options)
                torch.autograd.grad(out.float().sum() + lse.sum(), leaves)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"every kernel ran: {', '.join(types)}")
