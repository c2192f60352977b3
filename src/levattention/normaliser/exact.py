"""Exact normalisers: R for p = 2, R of the whitened symmetric lift for even p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.csr import is_csr
from levattention.features import MAX_COLUMNS, TensorPower, gigabytes
from levattention.gram import FP64_EPS, Advance, Gram, heads_first, inverse_where, triangle, triangle_of_blocks
from levattention.losses import Loss, Power
from levattention.normaliser.rows import Guarantee, WeightedRows, elements, stacked
from levattention.scorers.leverage import factor_keys
from levattention.scorers.lift import PowerBound, lifted
from levattention.summary import root

# The relative error up to which the Gram of the lift will do; R from QR is used beyond.
LIFT_ERROR = 1e-11


@dataclass(frozen=True)
class Exact:
    """Z(q) = Σⱼ⟨kⱼ, q⟩^p for even p, exact up to rounding, in O(d²) or O(D²) a query.

    p = 2: ‖Rq‖² with R from QR; qᵀ(KᵀK)q would lose κ² to rounding where this loses κ. Higher even p: with K = QR and
    the symmetric lift φ into D = C(r+p/2−1, p/2) columns, ⟨kⱼ, q⟩^(p/2) = ⟨φ(√n·qⱼ), φ(Rq/√n)⟩, so Z is ‖R′φ(Rq/√n)‖².
    Unlifted, the condition number would enter to the power p/2. Fewer than D keys are held as they are.
    """

    def __call__(self, keys: Tensor, loss: Loss, advance: Advance | None = None) -> WeightedRows:
        """The fitted normaliser; `advance` is told how many rows were read.

        Raises:
            ValueError: a loss other than even powers, or a lift that cannot fit.
        """
        if not (isinstance(loss, Power) and loss.even):
            raise ValueError(f"normaliser: Exact is for even powers, got loss={loss}; use Sampled")
        batch = keys.shape[:-2]
        if loss.p == 2:
            rows = stacked([triangle(head, advance) for head in elements(keys)], batch)
            return WeightedRows(loss, rows, _exactly("R from QR"))
        n, d = keys.shape[-2:]
        lift = TensorPower(int(loss.p) // 2)
        if n <= min(lift.width(d), MAX_COLUMNS):
            held = (keys.to_dense() if is_csr(keys) else keys).double()
            return WeightedRows(loss, held, _exactly("all keys are held"))
        whiteners = heads_first(factor_keys(keys, "exact")[0].whitener)
        rank = max(1, int((whiteners != 0).any(-2).sum(-1).max()))
        wide = lift.width(rank)
        if wide > MAX_COLUMNS:
            raise ValueError(
                f"normaliser: lifting rank {rank} to p = {loss.p} takes {wide:,} columns, a Gram of "
                f"{gigabytes(8 * wide * wide)}; at most {MAX_COLUMNS:,} are formed; use Sampled or TensorSketched"
            )
        frames: list[Tensor] = []
        roots: list[Tensor] = []
        flat = [keys] if is_csr(keys) else list(heads_first(keys).unsqueeze(1))
        for head, whitener in zip(flat, whiteners, strict=True):
            into, out_of = coordinates(whitener, rank, n)
            frames.append(out_of)
            roots.append(lifted_root(head, into.unsqueeze(0), lift, advance))
        return WeightedRows(
            Power(2),
            torch.stack(roots).reshape(*batch, wide, wide),
            _exactly("R of the whitened symmetric lift"),
            frame=torch.stack(frames).reshape(*batch, d, rank),
            lift=lift.k,
        )

    @staticmethod
    def fits(keys: Tensor, loss: Loss) -> bool:
        """Whether it exists and is worth its cost as a matter of course."""
        if not (isinstance(loss, Power) and loss.even):
            return False
        n, d = keys.shape[-2:]
        return (
            loss.p == 2
            or n <= min(TensorPower(int(loss.p) // 2).width(d), MAX_COLUMNS)
            or PowerBound(loss.p).lifts(keys)
        )


def _exactly(how: str) -> Guarantee:
    return Guarantee(0.0, 0.0, True, True, how)


def coordinates(whitener: Tensor, rank: int, n: int) -> tuple[Float64[Tensor, "d r"], Float64[Tensor, "d r"]]:
    """(A, B) with ⟨kA, qB⟩ = ⟨k, q⟩ for every key k, and KA having √n times orthonormal columns."""
    columns = whitener[:, (whitener != 0).any(0)]
    columns = torch.nn.functional.pad(columns, (0, rank - columns.shape[1]))
    squares = columns.square().sum(0)
    return columns * n**0.5, columns * inverse_where(squares > 0, squares) / n**0.5


def lifted_root(
    head: Tensor, into: Tensor, lift: TensorPower, advance: Advance | None = None
) -> Float64[Tensor, "wide wide"]:
    """R′ with ‖R′φ(y)‖² = Σⱼ⟨φ(kⱼA), φ(y)⟩².

    For unit y that sum is at least n, by the power mean, while the Gram's rounding is a few units of its largest
    eigenvalue: the quotient says whether the Gram will do.
    """
    n, wide = head.shape[-2], lift.width(into.shape[-1])
    gram = Gram(wide, device=head.device)
    for _, block in lifted(head, into, lift):
        gram.update(block, advance=advance)
    largest = float(torch.linalg.matrix_norm(gram.matrix, 2)) if wide < 64 else float(gram.matrix.abs().sum(-1).max())
    if 8 * FP64_EPS * largest <= LIFT_ERROR * n:
        return root(gram.matrix)
    upper = triangle_of_blocks((block for _, block in lifted(head, into, lift)), wide)
    return torch.nn.functional.pad(upper, (0, 0, 0, wide - len(upper)))
