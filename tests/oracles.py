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


def lewis_powers(keys: Tensor, weights: Tensor, p: float) -> Tensor:
    """r^p, with r² = kᵀ(KᵀW^(1−2/p)K)⁻¹k, by a QR of the weighted left singular vectors; zero rows give zero."""
    left, singular, _ = np.linalg.svd(keys.double().numpy(), full_matrices=False)
    basis = left[:, singular > singular[0] * keys.shape[-1] * 2.3e-16]
    live = weights.numpy() > 0
    scale = np.zeros(len(live))
    scale[live] = weights.numpy()[live] ** (0.5 - 1 / p)
    upper = np.linalg.qr(scale[:, None] * basis, mode="r")
    return torch.from_numpy(np.square(np.linalg.solve(upper.T, basis.T)).sum(0) ** (p / 2))


def lewis_ellipsoid(keys: Tensor, p: float) -> Tensor:
    """Lewis weights for p ≥ 2 as (kᵀMk)^(p/2), M the largest determinant with Σ(kᵀMk)^(p/2) ≤ d: a convex program."""
    import cvxpy as cp

    rows = keys.double().numpy()
    d = rows.shape[-1]
    shape = cp.Variable((d, d), symmetric=True)
    forms = cp.sum(cp.multiply(rows @ shape, rows), axis=1)
    problem = cp.Problem(cp.Maximize(cp.log_det(shape)), [cp.norm(forms, p / 2) <= d ** (2 / p)])
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    found = np.einsum("ni,ij,nj->n", rows, shape.value, rows).clip(min=0)
    return torch.from_numpy(found ** (p / 2))


def lp_sensitivity(keys: Tensor, index: int, p: float) -> float:
    """σ of one key under |x|^p: HiGHS for p = 1, CLARABEL through cvxpy otherwise."""
    rows = keys.double().numpy()
    left, singular, _ = np.linalg.svd(rows, full_matrices=False)
    basis = left[:, singular > singular[0] * rows.shape[-1] * 2.3e-16]
    if not rows[index].any():
        return 0.0
    n, d = basis.shape
    if p == 1:
        from scipy.optimize import linprog

        bound = np.block([[basis, -np.eye(n)], [-basis, -np.eye(n)]])
        answer = linprog(
            np.r_[np.zeros(d), np.ones(n)],
            A_ub=bound,
            b_ub=np.zeros(2 * n),
            A_eq=np.r_[basis[index], np.zeros(n)][None],
            b_eq=[1.0],
            bounds=(None, None),
            method="highs",
        )
        return 1.0 / answer.fun
    import cvxpy as cp

    query = cp.Variable(d)
    problem = cp.Problem(cp.Minimize(cp.pnorm(basis @ query, p)), [basis[index] @ query == 1])
    problem.solve(solver="CLARABEL")
    return float(problem.value) ** -p


def power_sums(keys: Tensor, queries: Tensor, p: float) -> np.ndarray:
    """Σⱼ|⟨q, kⱼ⟩|^p for every query, in NumPy's extended precision: right where fp64 itself has lost digits."""
    inner = queries.double().numpy().astype(np.longdouble) @ keys.double().numpy().astype(np.longdouble).T
    return (np.abs(inner) ** p).sum(-1)
