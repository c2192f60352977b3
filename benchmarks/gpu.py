"""LevAttention's kernels on one GPU: check every one against fp64, then time it beside full attention.

    python benchmarks/gpu.py [--out benchmarks/results/h200.json]
    compute-sanitizer python benchmarks/gpu.py --sanitize
    python benchmarks/gpu.py --plot benchmarks/results/h200.json docs/img/gpu.png

Nothing that fails its check gets a time. Times are medians over CUDA events; mode "graph" replays a CUDA graph, which
takes the cost of launching out of both sides. `floor_ms` is the time of reading K twice and Q once and writing O once
at the copy bandwidth measured in the same run.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import traceback
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "kernels")]

import levattention as la  # noqa: E402
import reference  # noqa: E402
from levattention import kernels  # noqa: E402
from levattention.causal import RunningSet  # noqa: E402
from levattention.residuals import Cluster, Sample  # noqa: E402
from levattention.scorers import Leverage  # noqa: E402
from levattention.select import Choice  # noqa: E402
from poison import poisoned  # noqa: E402

# B, H, n, d, k of the target table.
ROWS = [
    (64, 6, 197, 64, 32),
    (64, 16, 785, 64, 32),
    (1, 16, 1024, 128, 128),
    (1, 16, 2048, 128, 128),
    (1, 16, 4096, 128, 128),
    (1, 16, 8192, 128, 128),
    (1, 16, 16384, 128, 128),
    (1, 16, 65536, 128, 128),
    (1, 16, 262144, 128, 128),
    (1, 16, 1048576, 128, 128),
]
GRAPH_UP_TO = 65536
SDPA_UP_TO = 262144
BACKWARD_UP_TO = 262144
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHECK_SHAPES = [  # B, Hq, Hkv, m, n, d, k
    (2, 4, 2, 197, 197, 64, 32),
    (1, 2, 2, 301, 785, 64, 40),
    (1, 4, 1, 77, 1501, 128, 128),
    (1, 2, 2, 1500, 1500, 128, 100),
    (1, 2, 2, 333, 1333, 80, 130),
    (1, 2, 1, 130, 1300, 32, 5),
    (1, 1, 1, 257, 1100, 96, 64),
    (1, 1, 1, 100, 600, 256, 70),
]


CAUSAL_SHAPES = [  # B, Hq, Hkv, m, n, d, k, chunk, reach
    (2, 2, 1, 700, 700, 64, 40, 256, 0),
    (1, 2, 2, 500, 901, 128, 130, 130, 300),
    (1, 2, 1, 333, 1333, 80, 20, 64, 17),
    (1, 1, 1, 600, 600, 256, 64, 300, 100),
    (1, 1, 1, 301, 785, 32, 5, 7, 20),
]


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def gathered(x, index, group):
    rows = index.unsqueeze(-1).expand(*index.shape, x.shape[-1])
    return x.gather(2, rows).repeat_interleave(group, 1)


def check_attention(b, hq, hkv, m, n, d, k, dtype):
    """Errors against fp64 of (out, dq, dk, dv), ours and plain SDPA's over the gathered rows of the same index."""
    q, key, v = draw(b, hq, m, d, dtype=dtype), draw(b, hkv, n, d, dtype=dtype), draw(b, hkv, n, d, dtype=dtype)
    seed = draw(b, hq, m, d, dtype=dtype)
    scale = d**-0.5
    index = kernels.select(key, k)

    def run(attend, double=False):
        leaves = [t.detach().to(torch.float64 if double else dtype).requires_grad_() for t in (q, key, v)]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype))]

    exact = run(lambda *x: reference.attention(*x, index, scale=scale)[0], double=True)
    group = hq // hkv
    plain = run(lambda q, key, v: sdpa(q, gathered(key, index, group), gathered(v, index, group), scale=scale))
    with poisoned():
        ours = run(lambda *x: kernels.gathered_attention(*x, index, scale=scale)[0])
    return [relative(a, e) for a, e in zip(ours, exact, strict=True)], [
        relative(p, e) for p, e in zip(plain, exact, strict=True)
    ]


def check_selection(b, hq, hkv, m, n, d, k, dtype):
    """Errors of the Gram matrix, the scores and the order, and the share of the fp64 top k that is found."""
    key = draw(b, hkv, n, d, dtype=dtype)
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
    """Errors against fp64 of (out, dq, dk, dv) given the same sets, ours and SDPA's under a mask, and keys missed."""
    q, key, v = draw(b, hq, m, d, dtype=dtype), draw(b, hkv, n, d, dtype=dtype), draw(b, hkv, n, d, dtype=dtype)
    seed = draw(b, hq, m, d, dtype=dtype)
    options = {"chunk": chunk, "reach": reach}
    with poisoned():
        index, valid = kernels.running_top_k(key, k, chunk=chunk, first=n - m)
    seen = reference.causal_weights(index, valid, m, n, **options)
    group = hq // hkv

    def masked(q, key, v):
        key, v, mask = (x.repeat_interleave(group, 1) for x in (key, v, seen))
        return sdpa(q, key, v, attn_mask=mask, scale=d**-0.5)

    def run(attend, double=False):
        leaves = [t.detach().to(torch.float64 if double else dtype).requires_grad_() for t in (q, key, v)]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype))]

    exact = run(lambda *x: reference.masked_attention(*x, seen, scale=d**-0.5)[0], double=True)
    plain = run(masked)
    with poisoned():
        ours = run(lambda *x: kernels.causal_attention(*x, index, valid, scale=d**-0.5, **options)[0])
    return (
        [relative(a, e) for a, e in zip(ours, exact, strict=True)],
        [relative(p, e) for p, e in zip(plain, exact, strict=True)],
        missed_by_running_sets(key, index, valid, k, chunk, n - m),
    )


def missed_by_running_sets(key, index, valid, k, chunk, first):
    """The share of the keys in fp64's sets, over all chunks, that are not in ours."""
    n = key.shape[-2]
    grows = RunningSet(
        key, torch.ones(key.shape[:-1], dtype=torch.bool, device=key.device), Choice(Leverage(), k, None)
    )
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


SELECTION_BOUND = {"gram": 3e-6, "precise": 1e-14, "scores": 1e-4, "order": 0.0, "missed": 0.05}


def checks():
    """Every kernel at every type and shape; returns whether all passed, and the figures."""
    figures, good = [], True
    for dtype in DTYPES:
        for shape in CHECK_SHAPES:
            name = str(dtype).removeprefix("torch.")
            try:
                selection = check_selection(*shape, dtype)
                ours, plain = check_attention(*shape, dtype)
                passed = all(selection[key] <= bound for key, bound in SELECTION_BOUND.items())
                passed = passed and all(a <= 2 * p for a, p in zip(ours, plain, strict=True))
                figures.append(
                    {"dtype": name, "shape": shape, "passed": passed, "ours": ours, "sdpa": plain, **selection}
                )
                ratio = max(a / p for a, p in zip(ours, plain, strict=True))
                detail = f"attention error {ratio:.2f}x SDPA's, " + ", ".join(
                    f"{a} {x:.0e}" for a, x in selection.items()
                )
            except Exception as error:
                passed, detail = False, repr(error)[:300]
                figures.append({"dtype": name, "shape": shape, "passed": False, "error": detail})
                traceback.print_exc(limit=2)
            good &= passed
            print(f"{'ok  ' if passed else 'FAIL'} {name:9s}{shape!s:38s} {detail}", flush=True)
        for shape in CAUSAL_SHAPES:
            figure, detail = causal_figure(shape, dtype)
            good &= figure["passed"]
            figures.append(figure)
            print(f"{'ok  ' if figure['passed'] else 'FAIL'} {figure['dtype']:9s}{shape!s:38s} {detail}", flush=True)
    return good, figures


def causal_figure(shape, dtype):
    """The figures of one causal check and what to print of it."""
    figure = {"dtype": str(dtype).removeprefix("torch."), "causal": True, "shape": shape}
    try:
        ours, plain, missed = check_causal(*shape, dtype)
    except Exception as error:
        traceback.print_exc(limit=2)
        return {**figure, "passed": False, "error": repr(error)[:300]}, repr(error)[:300]
    passed = missed <= SELECTION_BOUND["missed"] and all(a <= 2 * p for a, p in zip(ours, plain, strict=True))
    ratio = max(a / p for a, p in zip(ours, plain, strict=True))
    figure |= {"passed": passed, "ours": ours, "sdpa": plain, "missed": missed}
    return figure, f"causal: attention error {ratio:.2f}x SDPA's, keys missed {missed:.0e}"


def timed(run, *, graph=False, warm=True, budget_ms=150.0, most=50):
    """Median milliseconds of `run`; a single run where one takes longer than the budget."""
    if graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay

    def once():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        return start, end

    if warm:
        run()
    torch.cuda.synchronize()
    start, end = once()
    torch.cuda.synchronize()
    first = start.elapsed_time(end)
    if first > budget_ms:
        return first
    pairs = [once() for _ in range(int(max(5, min(most, budget_ms / max(first, 1e-3)))))]
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def attempt(label, run, **options):
    try:
        return timed(run, **options)
    except Exception as error:
        print(f"  {label}: {error!r:.200}", flush=True)
        torch.cuda.empty_cache()
        return None


def copy_bandwidth():
    """Bytes read and written a second by a large device-to-device copy."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (timed(lambda: target.copy_(source)) * 1e-3)


def time_row(b, h, n, d, k, bandwidth):
    """The rows of the result for one shape: eager, and a graph where n is small."""
    q, key, v = (draw(b, h, n, d).requires_grad_() for _ in range(3))
    seed = draw(b, h, n, d)
    scale = d**-0.5
    floor = 1e3 * 4 * q.numel() * q.element_size() / bandwidth

    def lev():
        with torch.no_grad():
            return kernels.top_k_attention(q, key, v, k, scale=scale)[0]

    def full():
        with torch.no_grad():
            return sdpa(q, key, v, scale=scale)

    def lev_both():
        return torch.autograd.grad(kernels.top_k_attention(q, key, v, k, scale=scale)[0], (q, key, v), seed)

    def full_both():
        return torch.autograd.grad(sdpa(q, key, v, scale=scale), (q, key, v), seed)

    rows = []
    for mode in ("eager", "graph") if n <= GRAPH_UP_TO else ("eager",):
        graph = mode == "graph"
        row = {"B": b, "H": h, "n": n, "d": d, "k": k, "residual": None, "mode": mode}
        row["lev_ms"] = attempt("lev", lev, graph=graph)
        row["sdpa_ms"] = attempt("sdpa", full, graph=graph) if n <= SDPA_UP_TO else None
        both = n <= BACKWARD_UP_TO
        row["lev_fb_ms"] = attempt("lev backward", lev_both, graph=graph) if both else None
        row["sdpa_fb_ms"] = attempt("sdpa backward", full_both, graph=graph) if both and n <= SDPA_UP_TO else None
        row["floor_ms"] = floor
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row):
    def show(x):
        return f"{x:9.3f}" if x is not None else "        –"

    shape = f"{row['B']:3d} {row['H']:3d} {row['n']:8d} {row['d']:4d} {row['k']:4d} {row['mode']:6s}"
    return shape + "".join(show(row[x]) for x in ("sdpa_ms", "lev_ms", "floor_ms", "sdpa_fb_ms", "lev_fb_ms"))


HEADER = "  B   H        n    d    k mode       SDPA      lev    floor  SDPA fb   lev fb   (ms, bf16)"


def parts(b, h, n, d, k):
    """Each stage alone, by graph replay."""
    q, key, v = (draw(b, h, n, d) for _ in range(3))
    gram = kernels.gram(key)
    whitening = kernels.whiten(gram)
    scores = kernels.leverage(key, whitening)
    index = kernels.top_k(scores, k)
    nothing = torch.empty(1, device="cuda")
    stages = {
        "an empty kernel": lambda: nothing.zero_(),
        "gram": lambda: kernels.gram(key),
        "gram, precise": lambda: kernels.gram(key, precise=True),
        "whiten": lambda: kernels.whiten(gram),
        "leverage": lambda: kernels.leverage(key, whitening),
        "top_k": lambda: kernels.top_k(scores, k),
        "torch.topk": lambda: torch.topk(scores, k),
        "select": lambda: kernels.select(key, k),
        "attention": lambda: kernels.gathered_attention(q, key, v, index, scale=d**-0.5),
    }
    return {name: attempt(name, run, graph=True) for name, run in stages.items()}


def sketched_scores(keys, sketch):
    """kvpress's LeverageScorePress: centred keys, 48 sketched columns, a ridge of 1e-2, Cholesky, in fp32."""
    x = keys.float()
    x = (x - x.mean(-2, keepdim=True)) @ sketch
    gram = x.mT @ x + 1e-2 * torch.eye(x.shape[-1], device=x.device)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(gram), x.mT, upper=False).square().sum(-2)


def leverage_alone(b, h, n, d, k):
    """leverage_scores by four ways: time, largest relative error, and share of the fp64 top k."""
    keys = draw(b, h, n, d)
    wide = keys.float()
    sketch = draw(d, 48, dtype=torch.float32) / 48**0.5
    ways = {
        "ours": lambda: kernels.leverage(keys, kernels.whiten(kernels.gram(keys))),
        "kvpress formula": lambda: sketched_scores(keys, sketch),
        "torch.linalg.qr": lambda: torch.linalg.qr(wide)[0].square().sum(-1),
        "torch.linalg.svd": lambda: torch.linalg.svd(wide, full_matrices=False)[0].square().sum(-1),
    }
    gram = reference.gram(keys)
    p = torch.linalg.inv(torch.linalg.cholesky(gram)).mT
    exact = torch.stack(
        [(x.double() @ y).square().sum(-1) for x, y in zip(keys.flatten(0, 1), p.flatten(0, 1), strict=True)]
    )
    best = exact.topk(k).indices
    table = {}
    for name, run in ways.items():
        try:
            scores = run().flatten(0, 1)
            hit = (scores.topk(k).indices.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).double().mean().item()
            error = ((scores - exact).abs() / exact).max().item()
            table[name] = {"ms": timed(run, warm=False, most=20), "error": error, "found": hit}
            print(f"  {name:18s}{table[name]['ms']:10.3f} ms   error {error:.1e}   top-{k} found {hit:.3f}", flush=True)
        except Exception as error:
            print(f"  {name}: {error!r:.200}", flush=True)
    return table


def public_entry(b, h, n, d, k):
    """`attend` itself, with its checks, by residual: forward, and forward + backward, eager."""
    q, key, v = (draw(b, h, n, d).requires_grad_() for _ in range(3))
    seed = draw(b, h, n, d)
    table = {}
    for name, residual in (("Drop", None), ("Sample", Sample()), ("Cluster", Cluster())):

        def forward(residual=residual):
            with torch.no_grad():
                return la.attend(q, key, v, top_k=k, residual=residual)

        def both(residual=residual):
            return torch.autograd.grad(la.attend(q, key, v, top_k=k, residual=residual), (q, key, v), seed)

        table[name] = {"lev_ms": attempt(name, forward), "lev_fb_ms": attempt(f"{name} backward", both)}
        print(f"  {name:8s} {table[name]}", flush=True)
    return table


@contextlib.contextmanager
def without_kernels():
    """The plain torch route, wherever the tensors are."""
    plain = kernels.preferred
    kernels.preferred = lambda tensor: False
    try:
        yield
    finally:
        kernels.preferred = plain


def check_prefill(h, d, options, n=4096):
    """The largest relative difference of `attend` and its gradients from the torch route; more than 5e-2 raises.

    The keys' lengths differ, so that rounding swaps few keys and what is left is the attention's own error.
    """
    leaves = [draw(1, h, n, d) for _ in range(3)]
    leaves[1] = leaves[1] * torch.linspace(0.3, 3, n, device=leaves[1].device, dtype=leaves[1].dtype).unsqueeze(-1)
    leaves = [t.requires_grad_() for t in leaves]
    seed = draw(1, h, n, d)

    def run():
        out = la.attend(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, seed)]

    with poisoned():
        ours = run()
    with without_kernels():
        plain = run()
    worst = max(relative(a, p.double()) for a, p in zip(ours, plain, strict=True))
    if not worst <= 5e-2:
        raise RuntimeError(f"causal attend differs from the torch route by {worst:.1e}")
    return worst


def causal_prefill(h=16, d=128, k=256, window=1024):
    """Causal attention over a prompt: full, and chunks with a window and the universal set of the prefix."""
    options = {"top_k": k, "window": window, "is_causal": True, "chunk": window}
    print(f"  differs from the torch route by {check_prefill(h, d, options):.1e}", flush=True)
    table = []
    for n in (4096, 16384, 65536):
        q, key, v = (draw(1, h, n, d) for _ in range(3))
        leaves = [t.clone().requires_grad_() for t in (q, key, v)]
        seed = draw(1, h, n, d)
        index, valid = kernels.running_top_k(key, k, chunk=window)

        def full(x=(q, key, v)):
            return sdpa(*x, is_causal=True)

        def lev(x=(q, key, v)):
            return la.attend(*x, **options)

        def sets(key=key):
            return kernels.running_top_k(key, k, chunk=window)

        def attention(x=(q, key, v, index, valid)):
            return kernels.causal_attention(*x, chunk=window, reach=window, scale=d**-0.5)

        def both(attend, leaves=leaves, seed=seed):
            return torch.autograd.grad(attend(leaves), leaves, seed)

        row = {
            "n": n,
            "sdpa_ms": attempt("sdpa", full),
            "lev_ms": attempt("lev", lev),
            "lev_graph_ms": attempt("lev, graph", lev, graph=True),
            "sets_ms": attempt("sets", sets),
            "attention_ms": attempt("attention", attention),
            "sdpa_fb_ms": attempt("sdpa backward", lambda full=full, both=both: both(full)),
            "lev_fb_ms": attempt("lev backward", lambda lev=lev, both=both: both(lev)),
        }
        table.append(row)
        print(f"  {row}", flush=True)
    return table


def against_condition_number(n=16384, d=128, k=128, heads=4):
    """Share of the fp64 top k found and largest relative error of τ, as the keys grow ill-conditioned."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    table = []
    for dtype in (torch.bfloat16, torch.float32):
        for kappa in (1e0, 1e2, 1e3, 1e4, 1e6):
            keys = reference.conditioned((heads, n, d), kappa, generator, dtype, "cuda")
            q, _ = torch.linalg.qr(keys.double())
            exact = q.square().sum(-1)
            best = reference.top_k(exact, k)
            row = {"dtype": str(dtype).removeprefix("torch."), "kappa": kappa}
            # The condition number left once the keys are stored in this type and their columns scaled.
            unit = keys.double() / keys.double().norm(dim=-2, keepdim=True)
            values = torch.linalg.eigvalsh(unit.mT @ unit)
            row["kappa_scaled"] = (values.amax(-1) / values.amin(-1).clamp_min(1e-30)).sqrt().max().item()
            p = kernels.whiten(kernels.gram(keys))
            default = kernels.leverage(keys, p)
            inverse = torch.linalg.inv(torch.linalg.cholesky(kernels.gram(keys, precise=True))).mT
            precise = (keys.double() @ inverse).square().sum(-1)
            for name, scores in (("default", default), ("precise", precise)):
                hit = (reference.top_k(scores, k).unsqueeze(-1) == best.unsqueeze(-2)).any(-1).double().mean().item()
                row[name] = {"found": hit, "error": ((scores - exact).abs() / exact).max().item()}
            table.append(row)
            print(
                f"  {row['dtype']:9s} κ {kappa:7.0e} (scaled {row['kappa_scaled']:.1e})   default: found "
                f"{row['default']['found']:.3f}, error {row['default']['error']:.1e}   precise Gram, fp64 factor: "
                f"{row['precise']['found']:.3f}, {row['precise']['error']:.1e}",
                flush=True,
            )
    return table


def peak_memory(b=1, h=16, d=128, k=128):
    """Bytes above the inputs at the peak of forward + backward."""
    table = []
    for n in (1024, 4096, 16384, 65536):
        q, key, v = (draw(b, h, n, d).requires_grad_() for _ in range(3))
        row = {"n": n, "inputs": 3 * q.numel() * q.element_size()}
        for name, attend in (
            ("lev", lambda q, key, v: kernels.top_k_attention(q, key, v, k, scale=d**-0.5)[0]),
            ("sdpa", lambda q, key, v: sdpa(q, key, v)),
        ):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(attend(q, key, v).float().sum(), (q, key, v))
            torch.cuda.synchronize()
            row[name] = torch.cuda.max_memory_allocated() - before
        table.append(row)
        print(
            "  " + ", ".join(f"{a} {x / 2**20:.1f} MiB" if a != "n" else f"n {x}" for a, x in row.items()), flush=True
        )
    return table


def sanitize():
    """Every kernel once on odd little shapes, for compute-sanitizer."""
    for dtype in DTYPES:
        for b, hq, hkv, m, n, d, k in ((2, 2, 1, 33, 65, 64, 7), (1, 1, 1, 40, 1030, 80, 130), (1, 1, 1, 9, 9, 32, 3)):
            q, key, v = draw(b, hq, m, d, dtype=dtype), draw(b, hkv, n, d, dtype=dtype), draw(b, hkv, n, d, dtype=dtype)
            leaves = [t.requires_grad_() for t in (q, key, v)]
            mask = torch.ones(b, 1, n, dtype=torch.bool, device="cuda")
            mask[..., n - 1 :] = False
            for options in ({}, {"key_mask": mask}):
                out, index = kernels.top_k_attention(*leaves, k, scale=0.1, **options)
                torch.autograd.grad(out.float().sum(), leaves)
            kernels.gram(key.detach(), precise=True)
            bias = torch.zeros(b, hkv, k, device="cuda", requires_grad=True)
            out, lse = kernels.gathered_attention(*leaves, index, bias, scale=0.1)
            torch.autograd.grad(out.float().sum() + lse.sum(), [*leaves, bias])
            for options in ({}, {"mask": mask}):
                sets = kernels.running_top_k(key.detach(), k, chunk=7, first=n - m, **options)
                out, lse = kernels.causal_attention(*leaves, *sets, chunk=7, reach=5, scale=0.1, **options)
                torch.autograd.grad(out.float().sum() + lse.sum(), leaves)
    torch.cuda.synchronize()
    print("every kernel ran")


def plot(source, target):
    """Time against n, full attention and LevAttention, forward and forward + backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in json.loads(Path(source).read_text())["rows"] if r["d"] == 128 and r["mode"] == "eager"]
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for field, label, style in (
        ("sdpa_fb_ms", "full attention, forward + backward", "C3--"),
        ("sdpa_ms", "full attention, forward", "C3-"),
        ("lev_fb_ms", "LevAttention, forward + backward", "C0--"),
        ("lev_ms", "LevAttention, forward", "C0-"),
        ("floor_ms", "memory floor, forward", "k:"),
    ):
        points = [(r["n"], r[field]) for r in rows if r[field] is not None]
        axes.loglog(*zip(*points, strict=True), style, marker="o", markersize=3, label=label)
    axes.set(xlabel="keys n", ylabel="milliseconds", title="16 heads, d = 128, 128 keys kept, bf16, one H200")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(target, dpi=150)


def commit():
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or None


def section(title, run, *args):
    print(f"\n{title}", flush=True)
    try:
        return run(*args)
    except Exception:
        traceback.print_exc(limit=3)
        torch.cuda.empty_cache()
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200.json")
    parser.add_argument("--sanitize", action="store_true", help="run every kernel once on tiny shapes, and stop")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "PNG"), help="draw the figure from a result, and stop")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    options = parser.parse_args()
    if options.plot:
        return plot(*options.plot)
    torch.manual_seed(0)
    if options.sanitize:
        return sanitize()

    import triton

    bandwidth = copy_bandwidth()
    result = {
        "machine": torch.cuda.get_device_name(),
        "commit": options.commit or commit(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_s": bandwidth / 1e9,
        "rows": [],
    }
    print({key: result[key] for key in ("machine", "torch", "triton", "copy_gb_s")})

    def save():
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    good, result["checks"] = section("checks against fp64", checks) or (False, [])
    save()
    if not good:
        print("\na check failed: no times")
        return 1
    print(f"\n{HEADER}")
    for shape in ROWS:
        try:
            result["rows"] += time_row(*shape, bandwidth)
        except Exception:
            traceback.print_exc(limit=3)
        torch.cuda.empty_cache()
        save()
    result["parts"] = {str(s): section(f"stages at {s}", parts, *s) for s in (ROWS[0], ROWS[1], ROWS[4], ROWS[7])}
    for stages in result["parts"].values():
        print(stages and {name: ms and round(ms, 4) for name, ms in stages.items()})
    result["leverage_scores"] = section("leverage scores alone, n = 65536", leverage_alone, 1, 16, 65536, 128, 128)
    result["attend"] = {str(s): section(f"attend at {s}", public_entry, *s) for s in (ROWS[0], ROWS[1], ROWS[7])}
    result["causal"] = section("causal prefill, window 1024, 256 keys", causal_prefill)
    save()
    result["kappa"] = section("top-128 of 16384 keys against fp64", against_condition_number)
    result["peak_memory"] = section("peak memory above the inputs, forward + backward", peak_memory)
    save()
    print(f"\n{HEADER}")
    for row in result["rows"]:
        print(line(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
