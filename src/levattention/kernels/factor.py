"""P with P Pᵀ a generalised inverse of the Gram matrix, so that leverage is τ_i = ‖k_i P‖².

Cholesky, one warp a matrix, everything in registers: the work is a chain of short steps, and a step inside one warp
needs no barrier. Above 64 columns the two halves of the matrix take their turns. The columns are first scaled to unit
norm (leverage does not see column scaling). Eliminating row by row turns [A | I] into [U | L⁻¹]; the part of A still to
be eliminated and the part of L⁻¹ already known never overlap, so one D×D array holds both. Two rows are eliminated at
each step: a step costs the latency of a few reductions, and this halves their number.

A pivot at most `tol` (the diagonal is 1) marks a column that depends on earlier ones: it is dropped, its column of P
is zero. That is right for a rank-deficient Gram matrix, because kᵀ G⁻ k is the same for every generalised inverse G⁻
when k is in the row space; no ridge is added, so rescaling K changes nothing.
"""

import torch
import triton
import triton.language as tl

from .common import dot, eager, launch, padded_dim

# A pivot below this is what rounding alone leaves of a dependent column: fp32 sums inside a tile and a factor in fp32
# put about 1e-6 there, and so does storing the keys in bf16 (2⁻⁹ squared). It bounds what is resolved: κ ≈ 3e2.
TOLERANCE = 1e-5

# The widest matrix that one warp keeps in registers.
HALF = 64


@triton.jit
def unit_scale(diagonal):
    """1/√G_jj in fp32, 0 for an empty column."""
    x = diagonal.to(tl.float32)
    return tl.where(x > 0, 1.0 / tl.sqrt(tl.where(x > 0, x, 1.0)), 0.0)


@triton.jit
def finite(x):
    """NaN and inf as 0. A column that holds one then counts as dependent, and a row that holds one scores NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _load_rows(g_ptr, stride, unit, start, d, EQUILIBRATE: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Rows start … start + R of the matrix at `g_ptr`, scaled to a unit diagonal if asked."""
    r = start + tl.arange(0, R)
    c = tl.arange(0, D)
    g = tl.load(g_ptr + r[:, None] * stride + c[None, :], mask=(r < d)[:, None] & (c < d)[None, :], other=0.0)
    if EQUILIBRATE:
        own = unit_scale(tl.load(g_ptr + r * (stride + 1), mask=r < d, other=0.0))
        g = g * own[:, None] * unit[None, :]
    return finite(g.to(tl.float32))


@triton.jit
def _pivots(m, start, j, tol, scale, D: tl.constexpr, R: tl.constexpr):
    """(row, next row, multipliers of each, scale): what eliminating rows j and j + 1, which m holds, takes.

    By symmetry the multipliers of the rows below are the pivot row's own entries over the pivot.
    """
    r = start + tl.arange(0, R)
    c = tl.arange(0, D)
    first = tl.sum(tl.where((r == j)[:, None], m, 0.0), axis=0)
    second = tl.sum(tl.where((r == j + 1)[:, None], m, 0.0), axis=0)
    pivot = tl.sum(tl.where(c == j, first, 0.0), axis=0)
    cross = tl.sum(tl.where(c == j + 1, first, 0.0), axis=0)
    next_pivot = tl.sum(tl.where(c == j + 1, second, 0.0), axis=0)
    inverse = tl.where(pivot > tol, 1.0 / tl.maximum(pivot, tol), 0.0)
    ratio = cross * inverse
    # With 1 added to its pivot, subtracting a multiple of the row also leaves L⁻¹'s new entry in the pivot's column.
    row = tl.where(c == j, pivot + 1.0, first)
    second -= ratio * row
    next_pivot -= ratio * cross
    next_inverse = tl.where(next_pivot > tol, 1.0 / tl.maximum(next_pivot, tol), 0.0)
    next_row = tl.where(c == j + 1, next_pivot + 1.0, second)
    times = tl.where(c > j, first * inverse, 0.0)
    next_times = tl.where(c > j + 1, second * next_inverse, 0.0)
    scale = tl.where(c == j, tl.sqrt(inverse), tl.where(c == j + 1, tl.sqrt(next_inverse), scale))
    return row, next_row, times, next_times, scale


@triton.jit
def _eliminate(m, start, row, next_row, times, next_times, R: tl.constexpr):
    """Rows start … start + R less their multiples of the two pivot rows."""
    r = start + tl.arange(0, R)
    below = tl.gather(times, r, 0)
    next_below = tl.gather(next_times, r, 0)
    return m - below[:, None] * row[None, :] - next_below[:, None] * next_row[None, :]


@triton.jit
def _store_rows(p_ptr, stride, m, start, scale, unit, d, D: tl.constexpr, R: tl.constexpr):
    """Columns start … start + R of P, from those rows of L⁻¹: lower triangle, dropped rows and columns zero."""
    r = start + tl.arange(0, R)
    c = tl.arange(0, D)
    x = tl.where(r[:, None] == c[None, :], 1.0, tl.where(r[:, None] > c[None, :], m, 0.0))
    x = x * tl.gather(scale, r, 0)[:, None] * tl.where(scale > 0, unit, 0.0)[None, :]
    tl.store(p_ptr + c[None, :] * stride + r[:, None], x, mask=(r < d)[:, None] & (c < d)[None, :])


@triton.jit
def _whiten_kernel(
    g_ptr, p_ptr, d, tol, g_size, g_stride, p_size, p_stride, EQUILIBRATE: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """P for a d×d matrix, d ≤ D ≤ 64, row-major. The two may be the same memory: all is read before any is written.

    EQUILIBRATE scales the columns to unit norm. A Schur complement must not be: its pivots are measured against the
    columns it came from.
    """
    head = tl.program_id(0).to(tl.int64)
    g_ptr += head * g_size
    p_ptr += head * p_size
    # Four blocks of rows: a step searches one for its pivot rows and leaves alone those already done.
    R: tl.constexpr = D // 4
    c = tl.arange(0, D)
    unit = tl.full([D], 1.0, tl.float32)
    if EQUILIBRATE:
        unit = unit_scale(tl.load(g_ptr + c * (g_stride + 1), mask=c < d, other=0.0))
    scale = tl.zeros([D], tl.float32)
    m0 = _load_rows(g_ptr, g_stride, unit, 0, d, EQUILIBRATE, D, R)
    m1 = _load_rows(g_ptr, g_stride, unit, R, d, EQUILIBRATE, D, R)
    m2 = _load_rows(g_ptr, g_stride, unit, 2 * R, d, EQUILIBRATE, D, R)
    m3 = _load_rows(g_ptr, g_stride, unit, 3 * R, d, EQUILIBRATE, D, R)
    for j in range(0, tl.minimum(R, d), 2):
        row, next_row, times, next_times, scale = _pivots(m0, 0, j, tol, scale, D, R)
        m0 = _eliminate(m0, 0, row, next_row, times, next_times, R)
        m1 = _eliminate(m1, R, row, next_row, times, next_times, R)
        m2 = _eliminate(m2, 2 * R, row, next_row, times, next_times, R)
        m3 = _eliminate(m3, 3 * R, row, next_row, times, next_times, R)
    for j in range(R, tl.minimum(2 * R, d), 2):
        row, next_row, times, next_times, scale = _pivots(m1, R, j, tol, scale, D, R)
        m1 = _eliminate(m1, R, row, next_row, times, next_times, R)
        m2 = _eliminate(m2, 2 * R, row, next_row, times, next_times, R)
        m3 = _eliminate(m3, 3 * R, row, next_row, times, next_times, R)
    for j in range(2 * R, tl.minimum(3 * R, d), 2):
        row, next_row, times, next_times, scale = _pivots(m2, 2 * R, j, tol, scale, D, R)
        m2 = _eliminate(m2, 2 * R, row, next_row, times, next_times, R)
        m3 = _eliminate(m3, 3 * R, row, next_row, times, next_times, R)
    for j in range(3 * R, tl.minimum(4 * R, d), 2):
        row, next_row, times, next_times, scale = _pivots(m3, 3 * R, j, tol, scale, D, R)
        m3 = _eliminate(m3, 3 * R, row, next_row, times, next_times, R)
    _store_rows(p_ptr, p_stride, m0, 0, scale, unit, d, D, R)
    _store_rows(p_ptr, p_stride, m1, R, scale, unit, d, D, R)
    _store_rows(p_ptr, p_stride, m2, 2 * R, scale, unit, d, D, R)
    _store_rows(p_ptr, p_stride, m3, 3 * R, scale, unit, d, D, R)


@triton.jit
def _schur_kernel(g_ptr, p_ptr, w_ptr, d, H: tl.constexpr):
    """W = A21 P1, and S = A22 − W Wᵀ where P2 will be; P1 is there already, and what lies below it is zero."""
    head = tl.program_id(0).to(tl.int64)
    g_ptr += head * d * d
    p_ptr += head * d * d
    i = tl.arange(0, H)
    low = H + i
    below = (low < d)[:, None]
    corner_inside = below & (low < d)[None, :]
    own = unit_scale(tl.load(g_ptr + low * (d + 1), mask=low < d, other=0.0))
    other = unit_scale(tl.load(g_ptr + low * (d + 1), mask=low < d, other=0.0))
    left = tl.load(g_ptr + low[:, None] * d + i[None, :], mask=below, other=0.0) * own[:, None]
    corner = tl.load(g_ptr + low[:, None] * d + low[None, :], mask=corner_inside, other=0.0)
    p1 = tl.load(p_ptr + i[:, None] * d + i[None, :])
    w = dot(finite(left.to(tl.float32)), p1, tl.zeros([H, H], tl.float32), "tf32x3")
    tl.store(w_ptr + head * H * H + i[:, None] * H + i[None, :], w)
    s = finite((corner * own[:, None] * other[None, :]).to(tl.float32))
    s -= dot(w, tl.trans(w), tl.zeros([H, H], tl.float32), "tf32x3")
    tl.store(p_ptr + low[:, None] * d + low[None, :], s, mask=corner_inside)
    tl.store(p_ptr + low[:, None] * d + i[None, :], tl.zeros([H, H], tl.float32), mask=below)


@triton.jit
def _cross_kernel(g_ptr, p_ptr, w_ptr, d, H: tl.constexpr):
    """P12 = −P1 Wᵀ P2, and P2 scaled back to the columns' own units."""
    head = tl.program_id(0).to(tl.int64)
    p_ptr += head * d * d
    i = tl.arange(0, H)
    low = H + i
    right = (low < d)[None, :]
    corner_inside = (low < d)[:, None] & right
    own = unit_scale(tl.load(g_ptr + head * d * d + low * (d + 1), mask=low < d, other=0.0))
    p1 = tl.load(p_ptr + i[:, None] * d + i[None, :])
    w = tl.load(w_ptr + head * H * H + i[:, None] * H + i[None, :])
    p2 = tl.load(p_ptr + low[:, None] * d + low[None, :], mask=corner_inside, other=0.0)
    cross = dot(p1, tl.trans(w), tl.zeros([H, H], tl.float32), "tf32x3")
    cross = dot(cross, p2, tl.zeros([H, H], tl.float32), "tf32x3")
    tl.store(p_ptr + i[:, None] * d + low[None, :], -cross, mask=right)
    tl.store(p_ptr + low[:, None] * d + low[None, :], p2 * own[:, None], mask=corner_inside)


def _whiten_plain(gram, tol):
    """The same by `eigh` in fp64, for matrices too large for one program's registers."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal.clamp_min(torch.finfo(gram.dtype).tiny).rsqrt(), 0)
    scaled = torch.nan_to_num(gram * scale.unsqueeze(-1) * scale.unsqueeze(-2), posinf=0.0, neginf=0.0)
    values, vectors = torch.linalg.eigh(scaled.double())
    inverse = torch.where(values > tol, values.clamp_min(tol).rsqrt(), 0)
    return (scale.unsqueeze(-1) * vectors * inverse.unsqueeze(-2)).float()


def _whiten(gram: torch.Tensor, tol: float) -> torch.Tensor:
    d = gram.shape[-1]
    if d > 2 * HALF:
        return _whiten_plain(gram, tol).contiguous()
    g = gram.contiguous()
    out = torch.empty_like(g, dtype=torch.float32)
    heads = g.numel() // (d * d)
    strides = (d * d, d, d * d, d)
    first = {"EQUILIBRATE": True, "D": min(padded_dim(d), HALF)}
    launch(_whiten_kernel, (heads,), (g, out), (min(d, HALF), tol, *strides), first, warps=1)
    if d > HALF:
        w = g.new_empty((heads, HALF, HALF), dtype=torch.float32)
        corner = out.view(-1)[HALF * (d + 1) :]
        second = {"EQUILIBRATE": False, "D": HALF}
        launch(_schur_kernel, (heads,), (g, out, w), (d,), {"H": HALF}, warps=8)
        launch(_whiten_kernel, (heads,), (corner, corner), (d - HALF, tol, *strides), second, warps=1)
        launch(_cross_kernel, (heads,), (g, out, w), (d,), {"H": HALF}, warps=8)
    return out


_whiten_op = torch.library.custom_op("levattention::whiten", _whiten, mutates_args=())


@_whiten_op.register_fake
def _(gram, tol):
    return gram.new_empty(gram.shape, dtype=torch.float32)


def whiten(gram, *, tol=TOLERANCE):
    """P (fp32) with leverage τ_i = ‖k_i P‖², from the Gram matrix of the keys.

    Args:
        gram: (*batch, d, d) fp64 or fp32, symmetric positive semi-definite.
        tol: the smallest pivot, relative to the column's squared norm, that counts as independent.

    Returns:
        (*batch, d, d) fp32: diag(1/√G_ii)·L⁻ᵀ, upper triangular, with a zero column for each dependent key column.
        Above d = 128 it comes from `torch.linalg.eigh` and is not triangular.
    """
    return (_whiten if eager(gram) else _whiten_op)(gram, tol)
