"""The plain torch twin of every kernel, in fp64: the oracle of the tests and of benchmarks/gpu.py."""

import torch


def gram(keys, mask=None):
    """KᵀK in fp64."""
    keys = keys.double()
    if mask is not None:
        keys = keys.masked_fill(~mask.expand(keys.shape[:-1]).unsqueeze(-1), 0.0)
    return keys.mT @ keys


def leverage(keys, mask=None, rtol=1e-10):
    """τ_i = ‖e_iᵀ U_r‖² by the SVD in fp64; masked rows score −inf."""
    work = keys.double()
    if mask is not None:
        work = work.masked_fill(~mask.expand(keys.shape[:-1]).unsqueeze(-1), 0.0)
    u, s, _ = torch.linalg.svd(work, full_matrices=False)
    keep = s > rtol * s.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    scores = (u.square() * keep.unsqueeze(-2)).sum(-1)
    return scores if mask is None else scores.masked_fill(~mask.expand(scores.shape), float("-inf"))


def top_k(scores, k):
    """Positions of the k largest, best first, the smaller position first among equals."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


def attention(q, k, v, index, bias=None, *, scale, valid=None):
    """softmax(scale·q K[index]ᵀ + bias) V[index] and its logsumexp, in the type of the inputs."""
    rows = index.unsqueeze(-1).expand(*index.shape, k.shape[-1])
    group = q.shape[1] // k.shape[1]
    kg = k.gather(2, rows).repeat_interleave(group, 1)
    vg = v.gather(2, rows).repeat_interleave(group, 1)
    logits = scale * q @ kg.mT
    if bias is not None:
        logits = logits + bias.to(logits.dtype).repeat_interleave(group, 1).unsqueeze(-2)
    if valid is not None:
        logits = logits.masked_fill(~valid.repeat_interleave(group, 1).unsqueeze(-2), float("-inf"))
    empty = (logits == float("-inf")).all(-1, keepdim=True)
    lse = logits.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty.squeeze(-1), float("-inf"))
    weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights @ vg, lse


def causal_weights(index, valid, m, n, *, chunk, reach=0, mask=None):
    """Which keys each query of causal attention sees, (B, Hkv, m, n) bool, built one chunk and query at a time."""
    b, kv_heads, sets, _ = index.shape
    seen = torch.zeros(b, kv_heads, m, n, dtype=torch.bool, device=index.device)
    for t in range(m):
        i, before = t + n - m, t // chunk * chunk + n - m
        for j in range(b):
            for h in range(kv_heads):
                turn = t // chunk if sets > 1 else 0
                kept = index[j, h, turn][valid[j, h, turn]]
                seen[j, h, t, kept[kept < before]] = True
        seen[:, :, t, max(min(before, i - reach), 0) : i + 1] = True
    return seen if mask is None else seen & mask.expand(b, kv_heads, n).unsqueeze(2)


def masked_attention(q, k, v, seen, *, scale):
    """softmax(scale·qKᵀ)V over the keys that are seen, (B, Hkv, m, n), and its logsumexp, in the type of the inputs."""
    hidden = ~seen.any(2).unsqueeze(-1)
    k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    group = q.shape[1] // k.shape[1]
    kg, vg, seen = (x.repeat_interleave(group, 1) for x in (k, v, seen))
    logits = (scale * q @ kg.mT).masked_fill(~seen, float("-inf"))
    empty = ~seen.any(-1, keepdim=True)
    lse = logits.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty.squeeze(-1), float("-inf"))
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ vg, lse


def conditioned(shape, kappa, generator, dtype=torch.float64, device="cpu"):
    """(*batch, n, d) keys whose singular values fall geometrically from κ to 1, in a random basis."""
    *batch, n, d = shape
    q, _ = torch.linalg.qr(torch.randn(*batch, n, d, generator=generator, dtype=torch.float64, device=device))
    w, _ = torch.linalg.qr(torch.randn(*batch, d, d, generator=generator, dtype=torch.float64, device=device))
    s = torch.logspace(0, -torch.log10(torch.tensor(float(kappa))).item(), d, dtype=torch.float64, device=device)
    return (q * s @ w.mT * n**0.5).to(dtype)
