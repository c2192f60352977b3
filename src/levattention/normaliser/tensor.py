"""Even p whose lift does not fit: TensorSketches of the lift on both sides, unbiased."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.csr import csr_pick, is_csr
from levattention.features import MAX_COLUMNS, gigabytes
from levattention.gram import heads_first, project
from levattention.losses import Loss, Power
from levattention.normaliser.exact import coordinates
from levattention.normaliser.rows import Guarantee, elements, require_rates, stacked
from levattention.scorers.leverage import factor_keys
from levattention.scorers.lift import spans
from levattention.sketches import TensorMap, TensorSketch

# Queries on which a fitted sketch is tried, half of them towards keys.
PROBES = 64


@dataclass(frozen=True)
class TensorSketched:
    """Z(q) ≈ Σ_heavy⟨kⱼ, q⟩^p + S₁(y)ᵀ(Σ_light S₁(xⱼ)S₂(xⱼ)ᵀ)S₂(y), with independent TensorSketches S₁, S₂ of the lift.

    Keys and queries are whitened, as for `Exact`: x = √n·kP, y = P⁺q/√n. One sketch on both sides would be biased
    by the sum of its variances, which is of the order d^(p/2)/m; with two the errors are uncorrelated. The `m` keys of
    largest leverage are held as they are, since a sketch spoils long rows first.

    For a given query Chebyshev's inequality bounds the failure by (2v + v²)/δ², v = (2+3^(p/2))·Σ_light‖xⱼ‖^p/(n·m).
    Where that says nothing, as is usual, the sketch is tried on queries and refused if it fails on too many.

    Attributes:
        m: columns of a sketch; m² numbers are held.
        delta: δ in (0, 1).
        failure: the probability, for each query, that Z is farther off.
        seed: of the sketches.
    """

    m: int = 4096
    delta: float = 0.25
    failure: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        require_rates(delta=self.delta, failure=self.failure)
        TensorSketch(self.m, 2)
        if self.m > MAX_COLUMNS:
            raise ValueError(f"m: {self.m:,} columns take {gigabytes(8 * self.m**2)}; at most {MAX_COLUMNS:,}")

    def __call__(self, keys: Tensor, loss: Loss) -> SketchedLift:
        """The fitted normaliser.

        Raises:
            ValueError: a loss other than an even power above 2, or a sketch that fails on too many probes.
        """
        if not (isinstance(loss, Power) and loss.even and loss.p > 2):
            raise ValueError(f"normaliser: TensorSketched is for even p above 2, got loss={loss}")
        n, d = keys.shape[-2:]
        sketch = TensorSketch(self.m, int(loss.p) // 2)
        generator = torch.Generator().manual_seed(self.seed)
        maps = sketch.operator(d, generator), sketch.operator(d, generator)
        factor, _ = factor_keys(keys, "exact")
        scores = factor.leverage(keys).reshape(-1, n)
        heavy, cores, frames, wrong, vague = [], [], [], 0.0, 0.0
        for head, whitener, score in zip(elements(keys), heads_first(factor.whitener), scores, strict=True):
            into, out_of = coordinates(whitener, d, n)
            top = score.topk(min(self.m, n)).indices
            light = torch.ones(n, dtype=torch.bool, device=keys.device).index_fill(0, top, False)
            core, probes, true, mass = self._fold(head, into, light, maps, loss, generator)
            estimate = bilinear(core, maps, probes)
            held = (csr_pick(head, top) if is_csr(head) else head[top]).double()
            exact = loss(probes @ (held @ into).mT).sum(-1)
            total = exact + true
            off = torch.where(total > 0, (estimate.clamp(min=0.0) - true).abs() / total.clamp(min=1e-300), 0.0)
            wrong = max(wrong, float((off > self.delta).double().mean()))
            spread = sketch.variance * mass / n
            vague = max(vague, (2 * spread + spread**2) / self.delta**2)
            heavy.append(held)
            cores.append(core)
            frames.append(out_of)
        how = f"TensorSketch, m = {self.m}, of the lift; {min(self.m, n):,} keys exact"
        if vague > self.failure:
            how += f"; off by more on {wrong:.0%} of {PROBES} probes"
            if wrong > self.failure:
                raise ValueError(
                    f"normaliser: TensorSketch with m = {self.m} is off by more than {self.delta:g} on {wrong:.0%} of "
                    f"{PROBES} probe queries, failure = {self.failure:g}; raise m or delta, or use Sampled"
                )
        batch = keys.shape[:-2]
        if n <= self.m:
            guarantee = Guarantee(0.0, 0.0, True, True, "all keys are held")
        else:
            guarantee = Guarantee(self.delta, self.failure, False, vague <= self.failure, how)
        return SketchedLift(loss, stacked(heavy, batch), stacked(cores, batch), stacked(frames, batch), maps, guarantee)

    def _fold(
        self,
        head: Tensor,
        into: Tensor,
        light: Tensor,
        maps: tuple[TensorMap, TensorMap],
        loss: Power,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Σ S₁(x)S₂(x)ᵀ over the light keys; probe queries, their exact sums over those, and Σ‖x‖^p, in one pass."""
        n, d = head.shape[-2:]
        flat = head if is_csr(head) else head.unsqueeze(0)
        core = torch.zeros(self.m, self.m, dtype=torch.float64, device=head.device)
        towards = torch.randint(n, (PROBES // 2,), generator=generator).to(head.device)
        some = (csr_pick(head, towards) if is_csr(head) else head[towards]).double() @ into
        anywhere = torch.randn(PROBES // 2, d, dtype=torch.float64, generator=generator).to(head.device)
        probes = torch.nn.functional.normalize(torch.cat([some, anywhere * (into != 0).any(0)]), dim=-1)
        true, mass = torch.zeros(PROBES, dtype=torch.float64, device=head.device), 0.0
        for span in spans(flat, self.m):
            x = project(flat, slice(0, 1), span, into.unsqueeze(0))[0][light[span]]
            core += maps[0](x).mT @ maps[1](x)
            true += loss(probes @ x.mT).sum(-1)
            mass += float(x.norm(dim=-1).pow(loss.p).sum())
        return core, probes, true, mass


@dataclass(frozen=True)
class SketchedLift:
    """What `TensorSketched` fits.

    Attributes:
        loss: |x|^p.
        rows: keys that are held as they are, (*batch, h, d).
        core: Σ S₁(x)S₂(x)ᵀ, (*batch, m, m).
        frame: query coordinates, (*batch, d, d).
        maps: S₁ and S₂.
        guarantee: see `Guarantee`.
    """

    loss: Power
    rows: Float64[Tensor, "*batch h d"]
    core: Float64[Tensor, "*batch m m"]
    frame: Float64[Tensor, "*batch d d"]
    maps: tuple[TensorMap, TensorMap]
    guarantee: Guarantee

    def __call__(self, queries: Tensor) -> Float64[Tensor, "*batch q"]:
        """Z of every query."""
        exact = self.loss(queries @ self.rows.mT).sum(-1)
        return exact + bilinear(self.core, self.maps, queries @ self.frame).clamp(min=0.0)

    @property
    def work(self) -> int:
        """Numbers held at once for each query."""
        return self.rows.shape[-2] + 4 * self.core.shape[-1]

    @property
    def magnitude(self) -> Tensor:
        """The largest entry of the rows."""
        return self.rows.abs().amax((-2, -1))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values to be saved."""
        first, second = self.maps
        plain = {"p": self.loss.p, "m": first.sketch.m, "seeds": [first.seed, second.seed], "d": first.d}
        held = {"rows": self.rows, "core": self.core, "frame": self.frame}
        return held, {"kind": "tensor", **plain, "guarantee": asdict(self.guarantee)}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], plain: dict[str, Any]) -> SketchedLift:
        """What `state` described."""
        sketch = TensorSketch(plain["m"], int(plain["p"]) // 2)
        first, second = (TensorMap(sketch, plain["d"], seed) for seed in plain["seeds"])
        held = (tensors["rows"], tensors["core"], tensors["frame"])
        return cls(Power(plain["p"]), *held, (first, second), Guarantee(**plain["guarantee"]))


def bilinear(core: Tensor, maps: tuple[TensorMap, TensorMap], at: Tensor) -> Float64[Tensor, "*batch q"]:
    """S₁(y)ᵀ·core·S₂(y) for every row y."""
    return ((maps[0](at) @ core) * maps[1](at)).sum(-1)
