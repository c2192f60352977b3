"""Triton kernels for LevAttention's top-k path: keys -> Gram -> whitening -> scores -> set -> attention.

Each stage is one small file, and each has a plain torch twin that the tests use as its oracle:

- `gram(keys, mask)`: KᵀK, one read of the keys;
- `whiten(gram)`: P with leverage τ_i = ‖k_i P‖²;
- `leverage(keys, P, mask)`: τ, the second read of the keys;
- `top_k(scores, k)`: the positions of the k largest scores;
- `short_top_k(keys, k, mask)`: the last two in one launch, for at most 1,024 keys;
- `ranked(keys, k, mask)`: the positions of the k keys of largest leverage and every score, by whichever route fits;
- `select(keys, k, mask)`: those positions alone;
- `running_top_k(keys, k, chunk=...)`: the set of every prefix, chunk by chunk, for causal attention;
- `gathered_attention(q, k, v, index)`: softmax attention over the selected rows, with gradients;
- `causal_attention(q, k, v, index, valid)`: the same for causal queries, each over its chunk's set and its local keys;
- `top_k_attention(q, k, v, top_k)`: the whole of it.

This package is the bottom layer: it imports torch and Triton only, and Triton only when a kernel is first used.
"""

import importlib
import importlib.util
import math
import sys
from typing import Any

import torch

_HOME = {
    "gram": "gram_matrix",
    "whiten": "factor",
    "leverage": "scores",
    "top_k": "selection",
    "short_top_k": "short",
    "ranked": "fused",
    "select": "fused",
    "running_top_k": "running",
    "gathered_attention": "attention",
    "causal_attention": "prefill",
    "top_k_attention": "fused",
}

__all__ = [*_HOME, "preferred", "supported"]

MAX_HEAD_DIM = 256
# Programs along the second axis of a launch, which is where heads lie.
MAX_HEADS = 65535
# The most keys of a set that are chosen without a sort.
MAX_SET = 1024

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def preferred(tensor: torch.Tensor) -> bool:
    """True where the library should take the kernels: they can, and on a device where they win."""
    return tensor.is_cuda and supported(tensor)


def supported(tensor: torch.Tensor) -> bool:
    """True where the kernels can take `tensor` (keys, queries or values, last dimension d).

    That is: a bf16, fp16 or fp32 tensor with d ≤ 256 and at most 65,535 heads in all, on a CUDA device of compute
    capability 8.0 or later (or on the CPU under Triton's interpreter), with Triton installed. torch.compile can trace
    it.
    """
    if not _HAS_TRITON or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if tensor.layout != torch.strided or tensor.ndim < 2:
        return False
    if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM or tensor.numel() == 0:
        return False
    if math.prod(tensor.shape[:-2]) > MAX_HEADS:
        return False
    if tensor.is_cuda:
        return torch.version.hip is None and torch.cuda.get_device_properties(tensor.device).major >= 8
    return tensor.device.type == "cpu" and _interpreted()


def _interpreted() -> bool:
    """Triton's interpreter was chosen before Triton was first imported."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
