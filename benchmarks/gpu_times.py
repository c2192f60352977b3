"""Times on a GPU: LevAttention and its stages beside full attention, QR, SVD and kvpress's formula.

Every time is a median over CUDA events. Mode "graph" replays a CUDA graph of several runs one after the other and
divides by their number, which takes the cost of launching out of every side.
"""

import contextlib
import statistics

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import levattention as la
from gpu_checks import DEVICE, draw, kernels, poisoned, reference, relative
from levattention.residuals import Cluster, Sample

ROWS = [  # B, H, n, d, k
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
RESIDUAL_ROWS = [ROWS[0], ROWS[1], ROWS[4], ROWS[7]]
STAGES = [ROWS[0], ROWS[1], ROWS[4], ROWS[6], ROWS[7]]
PROFILED = [ROWS[0], ROWS[4], ROWS[6], ROWS[7]]
SCORES = (1, 16, 65536, 128, 128)
PROMPTS = (4096, 16384, 65536)
# For a run without a GPU, under Triton's interpreter.
TINY = (1, 2, 40, 16, 5)

GRAPH_UP_TO = 65536
SDPA_UP_TO = 262144
BACKWARD_UP_TO = 262144
RESIDUALS = {"sample": Sample(), "cluster": Cluster()}

# A rehearsal runs everything once and times nothing: what it compiles is there when times are taken.
rehearsal = DEVICE == "cpu"


def elapsed(run):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    return start, end


def captured(run, times):
    """A CUDA graph of so many runs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph


def timed(run, *, graph=False, warm=True, budget_ms=150.0, most=50):
    """Median milliseconds of `run`; a single run where one takes longer than the budget."""
    if rehearsal:
        run()
        return None
    if warm:
        run()
    torch.cuda.synchronize()
    start, end = elapsed(run)
    torch.cuda.synchronize()
    first, times = start.elapsed_time(end), 1
    if first > budget_ms:
        return first
    if graph:
        times = int(max(1, min(20, 4 / first)))
        run = captured(run, times).replay
        run()
        first *= times
    pairs = [elapsed(run) for _ in range(int(max(5, min(most, budget_ms / max(first, 1e-3)))))]
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / times


def attempt(label, run, **options):
    try:
        return timed(run, **options)
    except Exception as error:
        print(f"  {label}: {error!r:.300}", flush=True)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        return None


def copy_bandwidth():
    """Bytes read and written a second by a large device-to-device copy."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (timed(lambda: target.copy_(source)) * 1e-3)


def pair(attend, leaves, seed):
    """Forward without gradients, and forward + backward."""

    def forward():
        with torch.no_grad():
            return attend(*leaves)

    def both():
        return torch.autograd.grad(attend(*leaves), leaves, seed)

    return forward, both


def time_row(shape, bandwidth, residuals=(None,)):
    """The rows of the result for one shape, one for each residual: eager, and a graph where n is small."""
    b, h, n, d, k = shape
    leaves = [draw(b, h, n, d).requires_grad_() for _ in range(3)]
    seed = draw(b, h, n, d)
    floor = bandwidth and 1e3 * 4 * seed.numel() * seed.element_size() / bandwidth
    full, full_both = pair(sdpa, leaves, seed)
    rows = []
    for mode in ("eager", "graph") if n <= GRAPH_UP_TO else ("eager",):
        graph = mode == "graph"
        # Full attention compiles nothing, and takes seconds where n is large.
        beside = n <= (GRAPH_UP_TO // 16 if rehearsal else SDPA_UP_TO)
        peer = attempt("sdpa", full, graph=graph) if beside else None
        peer_both = attempt("sdpa backward", full_both, graph=graph) if beside else None
        for residual in residuals:
            row = {"B": b, "H": h, "n": n, "d": d, "k": k, "residual": residual, "mode": mode}
            stands_in = RESIDUALS.get(residual)

            def attend(q, key, v, stands_in=stands_in):
                return la.attend(q, key, v, top_k=k, residual=stands_in)

            lev, lev_both = pair(attend, leaves, seed)
            row["sdpa_ms"], row["sdpa_fb_ms"] = peer, peer_both
            row["lev_ms"] = attempt("lev", lev, graph=graph)
            row["lev_fb_ms"] = attempt("lev backward", lev_both, graph=graph) if n <= BACKWARD_UP_TO else None
            row["floor_ms"] = floor
            rows.append(row)
            print(line(row), flush=True)
    return rows


HEADER = "  B   H        n    d    k residual mode       SDPA      lev    floor  SDPA fb   lev fb   (ms, bf16)"


def line(row):
    """A row as text, under HEADER."""
    sizes = f"{row['B']:3d} {row['H']:3d} {row['n']:8d} {row['d']:4d} {row['k']:4d}"
    fields = ("sdpa_ms", "lev_ms", "floor_ms", "sdpa_fb_ms", "lev_fb_ms")
    figures = "".join("        –" if row[x] is None else f"{row[x]:9.3f}" for x in fields)
    return f"{sizes} {row['residual'] or 'drop':8s} {row['mode']:6s}{figures}"


def stages(b, h, n, d, k):
    """Milliseconds of each stage alone, by graph."""
    q, key, v = (draw(b, h, n, d) for _ in range(3))
    gram = kernels.gram(key, dtype=torch.float32)
    whitening = kernels.whiten(gram)
    scores = kernels.leverage(key, whitening)
    index = kernels.top_k(scores, k)
    nothing = torch.empty(1, device=DEVICE)
    found = {
        "an empty kernel": lambda: nothing.zero_(),
        "gram": lambda: kernels.gram(key, dtype=torch.float32),
        "gram, precise": lambda: kernels.gram(key, precise=True),
        "whiten": lambda: kernels.whiten(gram),
        "leverage": lambda: kernels.leverage(key, whitening),
        "top_k": lambda: kernels.top_k(scores, k),
        "torch.topk": lambda: torch.topk(scores, k),
        "select": lambda: kernels.select(key, k),
        "attention": lambda: kernels.gathered_attention(q, key, v, index, scale=d**-0.5),
    }
    found = {name: attempt(name, run, graph=True) for name, run in found.items()}
    print("  " + ", ".join(f"{name} {ms:.4f}" for name, ms in found.items() if ms is not None), flush=True)
    return found


def sketched_scores(keys, sketch):
    """kvpress's LeverageScorePress: centred keys, 48 sketched columns, a ridge of 1e-2, Cholesky, in fp32."""
    x = keys.float()
    x = (x - x.mean(-2, keepdim=True)) @ sketch
    gram = x.mT @ x + 1e-2 * torch.eye(x.shape[-1], device=x.device)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(gram), x.mT, upper=False).square().sum(-2)


def leverage_scores(b, h, n, d, k):
    """Leverage scores by five ways: time, largest relative error, and share of the fp64 top k."""
    keys = draw(b, h, n, d)
    wide = keys.float()
    sketch = draw(d, 48, dtype=torch.float32) / 48**0.5
    ways = {
        "ours, the ranking": lambda: kernels.leverage(keys, kernels.whiten(kernels.gram(keys, dtype=torch.float32))),
        "leverage_scores": lambda: la.leverage_scores(keys),
        "kvpress formula": lambda: sketched_scores(keys, sketch),
        "torch.linalg.qr": lambda: torch.linalg.qr(wide)[0].square().sum(-1),
        "torch.linalg.svd": lambda: torch.linalg.svd(wide, full_matrices=False)[0].square().sum(-1),
    }
    p = torch.linalg.inv(torch.linalg.cholesky(reference.gram(keys))).mT
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
            print(f"  {name:18s} {table[name]}", flush=True)
        except Exception as error:
            print(f"  {name}: {error!r:.200}", flush=True)
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


def check_prefill(h, n, d, options):
    """The largest relative difference of `attend` and its gradients from the torch route; more than 5e-2 raises.

    The keys' lengths differ, so that rounding swaps few keys and what is left is the attention's own error.
    """
    leaves = [draw(1, h, n, d) for _ in range(3)]
    leaves[1] = leaves[1] * torch.linspace(0.3, 3, n, device=DEVICE, dtype=leaves[1].dtype).unsqueeze(-1)
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


def causal_prefill(prompts=PROMPTS, h=16, d=128, k=256, window=1024):
    """Causal attention over a prompt: full, and chunks with a window and the universal set of the prefix."""
    options = {"top_k": k, "window": window, "is_causal": True, "chunk": window}
    print(f"  differs from the torch route by {check_prefill(h, prompts[0], d, options):.1e}", flush=True)
    table = []
    for n in prompts:
        leaves = [draw(1, h, n, d).requires_grad_() for _ in range(3)]
        q, key, v = (t.detach() for t in leaves)
        seed = draw(1, h, n, d)
        index, valid = kernels.running_top_k(key, k, chunk=window)
        full, full_both = pair(lambda *x: sdpa(*x, is_causal=True), leaves, seed)
        lev, lev_both = pair(lambda *x: la.attend(*x, **options), leaves, seed)

        def sets(key=key):
            return kernels.running_top_k(key, k, chunk=window)

        def attention(x=(q, key, v, index, valid)):
            return kernels.causal_attention(*x, chunk=window, reach=window, scale=d**-0.5)

        row = {
            "n": n,
            "sdpa_ms": attempt("sdpa", full),
            "lev_ms": attempt("lev", lev),
            "lev_graph_ms": attempt("lev, graph", lev, graph=True),
            "sets_ms": attempt("sets", sets),
            "attention_ms": attempt("attention", attention),
            "sdpa_fb_ms": attempt("sdpa backward", full_both),
            "lev_fb_ms": attempt("lev backward", lev_both),
        }
        table.append(row)
        print(f"  {row}", flush=True)
    return table


def against_condition_number(n=16384, d=128, k=128, heads=4):
    """Share of the fp64 top k found and largest relative error of τ, as the keys grow ill-conditioned."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    table = []
    for dtype in (torch.bfloat16, torch.float32):
        for kappa in (1e0, 1e2, 1e3, 1e4, 1e6):
            keys = reference.conditioned((heads, n, d), kappa, generator, dtype, DEVICE)
            q, _ = torch.linalg.qr(keys.double())
            exact = q.square().sum(-1)
            best = reference.top_k(exact, k)
            row = {"dtype": str(dtype).removeprefix("torch."), "kappa": kappa}
            # The condition number left once the keys are stored in this type and their columns scaled.
            unit = keys.double() / keys.double().norm(dim=-2, keepdim=True)
            values = torch.linalg.eigvalsh(unit.mT @ unit)
            row["kappa_scaled"] = (values.amax(-1) / values.amin(-1).clamp_min(1e-30)).sqrt().max().item()
            default = kernels.leverage(keys, kernels.whiten(kernels.gram(keys, dtype=torch.float32)))
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


def peak_memory(lengths=(1024, 4096, 16384, 65536), h=16, d=128, k=128):
    """Bytes above the inputs at the peak of forward + backward."""
    table = []
    for n in lengths:
        leaves = [draw(1, h, n, d).requires_grad_() for _ in range(3)]
        row = {"n": n, "inputs": 3 * leaves[0].numel() * leaves[0].element_size()}
        for name, attend in (("lev", lambda *x: la.attend(*x, top_k=k)), ("sdpa", sdpa)):
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(attend(*leaves).float().sum(), leaves)
            row[name] = torch.cuda.max_memory_allocated() - before
        table.append(row)
        print(f"  {row}", flush=True)
    return table


def profile(shapes=PROFILED, prompt=PROMPTS[-1]):
    """Every kernel of attend once, forward and backward, between two calls that a profiler waits for.

    Run it under `ncu --profile-from-start off`. A kernel of torch.erfinv stands between one shape and the next.
    """
    runs = []
    for shape in shapes:
        b, h, n, d, k = shape
        leaves = [draw(b, h, n, d).requires_grad_() for _ in range(3)]
        runs.append(pair(lambda *x, k=k: la.attend(*x, top_k=k), leaves, draw(b, h, n, d))[1])
    leaves = [draw(1, 16 if DEVICE == "cuda" else 2, prompt, shapes[-1][3]).requires_grad_() for _ in range(3)]
    options = {"top_k": 256, "window": 1024, "is_causal": True, "chunk": 1024}
    if DEVICE == "cpu":
        options |= {"top_k": 5, "window": 8, "chunk": 16}
    runs.append(pair(lambda *x: la.attend(*x, **options), leaves, torch.randn_like(leaves[0]))[1])
    border = torch.zeros(1, device=DEVICE)
    for run in runs:
        run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    for run in runs:
        torch.erfinv(border)
        run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
