"""Attention over universal keys against full attention on the CPU: forward, forward + backward, causal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import levattention as la
from cases._timing import medians

LENGTHS = (256, 1024, 4096, 16384)
KEPT = 64


def both(attend: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> None:
    torch.autograd.grad(attend(*leaves).sum(), leaves)


def run() -> dict:
    """Seconds at 4 heads of 64 columns, 64 keys kept, and full attention's time over ours."""
    figures: dict = {}
    generator = torch.Generator().manual_seed(0)
    cluster = la.residuals.Cluster()
    for n in LENGTHS:
        leaves = [torch.randn(1, 4, n, 64, generator=generator).requires_grad_() for _ in range(3)]
        plain = [leaf.detach() for leaf in leaves]
        contenders = {
            "full": lambda x=plain: sdpa(*x),
            "ours": lambda x=plain: la.attend(*x, top_k=KEPT),
            "ours, clusters": lambda x=plain: la.attend(*x, top_k=KEPT, residual=cluster),
            "full, causal": lambda x=plain: sdpa(*x, is_causal=True),
            "ours, causal": lambda x=plain: la.attend(*x, top_k=KEPT, is_causal=True),
            "full, forward + backward": lambda x=leaves: both(sdpa, x),
            "ours, forward + backward": lambda x=leaves: both(lambda q, k, v: la.attend(q, k, v, top_k=KEPT), x),
            "ours, clusters, forward + backward": lambda x=leaves: both(
                lambda q, k, v: la.attend(q, k, v, top_k=KEPT, residual=cluster), x
            ),
        }
        seconds = medians(contenders, repeats=5 if n < 16384 else 3)
        figures |= {f"{n} {name} s": value for name, value in seconds.items()}
        for ours, full in (
            ("ours", "full"),
            ("ours, clusters", "full"),
            ("ours, causal", "full, causal"),
            ("ours, forward + backward", "full, forward + backward"),
            ("ours, clusters, forward + backward", "full, forward + backward"),
        ):
            figures[f"{n} speed-up, {ours}"] = seconds[full] / seconds[ours]
    return figures
