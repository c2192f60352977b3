"""The ways of choosing k keys a head that the inference table compares, by name."""

from __future__ import annotations

from levattention.vision.layout import RADIUS
from levattention.vision.selection import Selection

LEWIS = "lewis-"
TITLES = {
    "leverage": "leverage",
    "norm": "row norm",
    "random": "random positions",
    "lewis-4": "Lewis, p = 4",
    "local": "leverage + local tokens",
    "sample": "leverage ¼, rest sampled",
    "cluster": "clusters",
    "cluster-keys": "clusters, without queries",
}


def title(name: str) -> str:
    """A selector's name as people read it.

    Raises:
        ValueError: a selector that does not exist.
    """
    return TITLES[name] if name in TITLES else f"Lewis, p = {_power(name):g}"


def selection(name: str, top_k: int, *, radius: int = RADIUS, seed: int = 0) -> Selection:
    """The selection that a name stands for: one of TITLES, or lewis-P for another power.

    Raises:
        ValueError: a selector that does not exist.
    """
    if name in ("sample", "cluster", "cluster-keys"):
        return Selection(top_k=top_k, residual=name, seed=seed)
    if name == "local":
        return Selection(top_k=top_k, local=radius)
    if name in ("leverage", "norm", "random"):
        return Selection(name, top_k, seed=seed)
    return Selection("lewis", top_k, p=_power(name))


def _power(name: str) -> float:
    prefix, _, power = name.partition(LEWIS)
    try:
        found = float(power) if not prefix else 0.0
    except ValueError:
        found = 0.0
    if not 1 <= found < float("inf"):
        raise ValueError(f"selector: expected one of {', '.join(TITLES)}, or {LEWIS}P with P >= 1, got {name!r}")
    return found
