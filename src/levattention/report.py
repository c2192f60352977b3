"""What people look at: the demo's table and picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from levattention.adversary import Attack, attack
from levattention.pages import canvas
from levattention.scorers import Leverage
from levattention.universal import UniversalSet, universal_set

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def planted_keys(n: int, d: int, heavy: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Gaussian keys with `heavy` rows that stand out at random places, and those places.

    Half of them are long; the other half are short keys in directions that few keys have. Ten times as many decoys
    are long keys in common directions, which no query can single out.
    """
    keys = torch.randn(n, d, generator=generator)
    rare = d // 4
    keys[:, :rare] *= 0.02
    places = torch.randperm(n, generator=generator)
    planted, decoys = places[:heavy], places[heavy : 11 * heavy]
    keys[decoys] *= 3
    short, long = planted[: heavy // 2], planted[heavy // 2 :]
    keys[short] = 0.0
    keys[short, torch.arange(len(short)) % rare] = 1.5
    keys[long] *= 40
    return keys, planted


@dataclass(frozen=True)
class Planted:
    """Planted keys, their universal set, and what an attack on it found.

    Attributes:
        keys: (n, d).
        places: where the planted keys are.
        eps: the threshold.
        found: the universal set.
        scores: leverage scores, (n,).
        strongest: the heaviest weight that a query was found to put outside the set.
    """

    keys: Tensor
    places: Tensor
    eps: float
    found: UniversalSet
    scores: Tensor
    strongest: Attack

    @property
    def size(self) -> int:
        """|U|."""
        return int(self.found.size)

    def lines(self) -> list[tuple[str, str]]:
        """The figures, with the row norm as the obvious alternative."""
        n, d = self.keys.shape
        found = self.found
        by_norm = self.keys.norm(dim=-1).topk(self.size).indices
        heavy = self.places[self.scores[self.places] >= self.eps]
        caught = [int(torch.isin(heavy, index).sum()) for index in (found.index[found.valid], by_norm)]
        return [
            ("keys", f"{n:,} × {d}, rank {int(found.rank) if found.rank is not None else '?'}"),
            ("threshold ε", f"{self.eps}"),
            ("|U|", f"{self.size}  (the theorem allows d/ε = {int(d / self.eps)})"),
            ("planted heavy keys found", f"{caught[0]} of {len(heavy)}"),
            (f"found by the {self.size} longest keys", f"{caught[1]} of {len(heavy)}"),
            ("heaviest weight outside U, proved", f"{float(self.scores[~found.mask(n)].max()):.4f}"),
            ("heaviest weight outside U, found by attack", f"{self.strongest.weight:.4f}"),
        ]

    def verdict(self) -> str:
        """What came of the attack."""
        weight = self.strongest.weight
        verdict = "none got through" if weight < self.eps else "A QUERY GOT THROUGH: please report this"
        return (
            f"Attack on U: {self.strongest.tried:,} queries tried against ε = {self.eps}; the heaviest weight on a key "
            f"outside U was {weight:.4f}: {verdict}."
        )


def run_planted_keys(screen: Console, notices: Console) -> Planted:
    """Find the universal set of planted keys, attack it, and show a table."""
    generator = torch.Generator().manual_seed(0)
    n, d, eps = 20_000, 32, 0.05
    keys, places = planted_keys(n, d, 24, generator)
    with notices.status("scoring the keys"):
        report = Leverage().report(keys)
        found = universal_set(keys, eps=eps)
    outside = (~found.mask(n)).nonzero().squeeze(-1)
    # The likeliest to break through are the keys just under the threshold.
    outside = outside[report.scores[outside].argsort(descending=True)[:2000]]
    with notices.status("searching for a query that breaks the set"):
        strongest = attack(keys, outside, steps=60, generator=generator)
    planted = Planted(keys, places, eps, found, report.scores, strongest)
    table = Table(title="The keys that can ever matter", show_header=False)
    for line in planted.lines():
        table.add_row(*line)
    screen.print(table)
    screen.print(planted.verdict())
    return planted


def draw_scores(planted: Planted) -> Figure:
    """Scores in falling order on log axes, with ε, |U| and the bound d/ε."""
    falling = planted.scores.sort(descending=True).values.clamp(min=1e-12).numpy()
    size, eps, d = planted.size, planted.eps, planted.keys.shape[-1]
    figure, (axes,) = canvas(height=4.5)
    axes.loglog(range(1, len(falling) + 1), falling, color="tab:blue", label="leverage score, best first")
    axes.axhline(eps, color="tab:red", linestyle="--", label=f"ε = {eps}")
    axes.axvline(size, color="tab:green", label=f"|U| = {size}")
    axes.axvline(d / eps, color="gray", linestyle=":", label=f"bound d/ε = {int(d / eps)}")
    axes.fill_between(range(1, size + 1), falling[:size], eps, color="tab:green", alpha=0.2)
    axes.set(xlabel="rank of the key", ylabel="largest weight any query can give it", title="Universal set, f(x) = x²")
    axes.legend(loc="lower left")
    return figure
