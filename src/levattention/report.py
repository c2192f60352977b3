"""What people look at: the demo's table and picture."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from levattention.adversary import Attack, attack
from levattention.scorers import Leverage
from levattention.sources import replacing
from levattention.universal import UniversalSet, universal_set


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


def run_demo(out: Path, screen: Console, notices: Console) -> None:
    """Find the universal set of planted keys, attack it, show a table and write one picture."""
    out.mkdir(parents=True, exist_ok=True)
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
    picture = out / "universal_set.png"
    draw_scores(picture, report.scores, found, eps, d)
    screen.print(demo_table(keys, places, found, report.scores, eps, strongest))
    verdict = "none got through" if strongest.weight < eps else "A QUERY GOT THROUGH: please report this"
    screen.print(
        f"Attack on U: {strongest.tried:,} queries tried against ε = {eps}; the heaviest weight on a key outside U "
        f"was {strongest.weight:.4f}: {verdict}."
    )
    screen.print(f"Picture: {picture}")


def demo_table(
    keys: Tensor, places: Tensor, found: UniversalSet, scores: Tensor, eps: float, strongest: Attack
) -> Table:
    """The demo's figures, with the row norm as the obvious alternative."""
    n, d = keys.shape
    size = int(found.size)
    by_norm = keys.norm(dim=-1).topk(size).indices
    heavy = places[scores[places] >= eps]
    table = Table(title="The keys that can ever matter", show_header=False)
    table.add_row("keys", f"{n:,} × {d}, rank {int(found.rank) if found.rank is not None else '?'}")
    table.add_row("threshold ε", f"{eps}")
    table.add_row("|U|", f"{size}  (the theorem allows d/ε = {int(d / eps)})")
    table.add_row(
        "planted heavy keys found", f"{int(torch.isin(heavy, found.index[found.valid]).sum())} of {len(heavy)}"
    )
    table.add_row(f"found by the {size} longest keys", f"{int(torch.isin(heavy, by_norm).sum())} of {len(heavy)}")
    table.add_row("heaviest weight outside U, proved", f"{float(scores[~found.mask(n)].max()):.4f}")
    table.add_row("heaviest weight outside U, found by attack", f"{strongest.weight:.4f}")
    return table


def draw_scores(path: Path, scores: Tensor, found: UniversalSet, eps: float, d: int) -> None:
    """Scores in falling order on log axes, with ε, |U| and the bound d/ε."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    falling = scores.sort(descending=True).values.clamp(min=1e-12).numpy()
    size = int(found.size)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.loglog(range(1, len(falling) + 1), falling, color="tab:blue", label="leverage score, best first")
    axes.axhline(eps, color="tab:red", linestyle="--", label=f"ε = {eps}")
    axes.axvline(size, color="tab:green", label=f"|U| = {size}")
    axes.axvline(d / eps, color="gray", linestyle=":", label=f"bound d/ε = {int(d / eps)}")
    axes.fill_between(range(1, size + 1), falling[:size], eps, color="tab:green", alpha=0.2)
    axes.set(xlabel="rank of the key", ylabel="largest weight any query can give it", title="Universal set, f(x) = x²")
    axes.legend(loc="lower left")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130)
    plt.close(figure)
