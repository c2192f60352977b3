"""Independent answers: slow, plain, and sharing no code with the package."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def leverage_by_svd(keys: Tensor, rtol: float) -> Tensor:
    """τ as squared row norms of the left singular vectors, in NumPy fp64, one batch element at a time."""
    flat = keys.double().reshape(-1, *keys.shape[-2:]).numpy()
    scores = []
    for matrix in flat:
        left, singular, _ = np.linalg.svd(matrix, full_matrices=False)
        scores.append(np.square(left[:, singular > singular[0] * rtol]).sum(-1))
    return torch.from_numpy(np.stack(scores)).reshape(keys.shape[:-1])


def attention(keys: Tensor, queries: Tensor, f) -> Tensor:
    """A = D⁻¹f(QKᵀ) by brute force, in fp64; rows whose sum is zero are zero."""
    values = f(queries.double() @ keys.double().mT)
    total = values.sum(-1, keepdim=True)
    return torch.where(total > 0, values / total, torch.zeros_like(values))
