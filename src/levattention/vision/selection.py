"""How a model's heads choose their keys, as a value that can be written down."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from levattention.integrations.huggingface import attention_modules, use_full_attention, use_lev_attention
from levattention.residuals import Cluster, Drop, Residual, Sample
from levattention.scorers import Leverage, Lewis, Norm, Random, Scorer
from levattention.vision.layout import layout

BY = ("leverage", "norm", "random", "lewis")
RESIDUALS = ("drop", "sample", "cluster", "heavy-cluster", "cluster-keys")


@dataclass(frozen=True)
class Selection:
    """Every head sees `top_k` keys, chosen `by` their scores; the residual stands for the others.

    Attributes:
        by: "leverage", "norm" (squared row norms), "random" (fixed positions, other ones in every head and layer) or
            "lewis" (ℓp Lewis weights).
        top_k: budget of slots a head.
        residual: "drop", "sample", "cluster", "heavy-cluster" (a quarter of the slots for the best keys), or
            "cluster-keys" (clusters that do not depend on the queries).
        local: patches within this Manhattan distance are seen besides; 0 for none.
        p: for Lewis weights.
        seed: of random positions and of samples; layer i uses seed + i.

    Example:
        >>> Selection("random", 32).describe()
        'random top-32'
    """

    by: str = "leverage"
    top_k: int = 32
    residual: str = "drop"
    local: int = 0
    p: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise ValueError(f"by: expected one of {', '.join(BY)}, got {self.by!r}")
        if self.residual not in RESIDUALS:
            raise ValueError(f"residual: expected one of {', '.join(RESIDUALS)}, got {self.residual!r}")
        if self.top_k < 1:
            raise ValueError(f"top_k: expected a positive number of keys, got {self.top_k}")

    def describe(self) -> str:
        """In a few words, for titles and tables."""
        by = f"lewis p={self.p:g}" if self.by == "lewis" else self.by
        rest = "" if self.residual == "drop" else f" + {self.residual}"
        return f"{by} top-{self.top_k}{rest}" + (" + local" if self.local else "")

    def apply(self, model: nn.Module) -> nn.Module:
        """The model itself, whose attention now works this way."""
        layers = {i: self._options(i) for i in range(sum(1 for _ in attention_modules(model)))}
        return use_lev_attention(model, window=layout(model).grid(self.local) if self.local else 0, layers=layers)

    def as_dict(self) -> dict[str, Any]:
        """What `Selection(**...)` takes."""
        return asdict(self)

    def scorer(self, layer: int = 0) -> Scorer:
        """What scores the keys of a layer."""
        made: dict[str, Scorer] = {
            "leverage": Leverage(),
            "norm": Norm(),
            "random": Random(self.seed + layer),
            "lewis": Lewis(self.p),
        }
        return made[self.by]

    def _options(self, layer: int) -> dict[str, Any]:
        # Positions that are drawn differ from layer to layer: a patch that no layer ever sees is lost for good.
        residual: dict[str, Residual] = {
            "drop": Drop(),
            "sample": Sample(seed=self.seed + layer),
            "cluster": Cluster(),
            "heavy-cluster": Cluster(heavy=0.25),
            "cluster-keys": Cluster(use_queries=False, tangents=0),
        }
        return {
            "top_k": self.top_k,
            "scorer": self.scorer(layer),
            "residual": residual[self.residual],
        }


def apply_selection(model: nn.Module, selection: Selection | None) -> nn.Module:
    """The model itself, with this selection, or with full attention for None."""
    return use_full_attention(model) if selection is None else selection.apply(model)
