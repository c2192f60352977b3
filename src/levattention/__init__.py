"""LevAttention: the keys that can ever receive a large attention weight, and attention on them.

The flow is keys -> scores -> universal set -> attention, or heavy queries. A scorer (`scorers`) turns the keys of a
head into scores that bound each key's sensitivity, the largest attention weight any query can give it;
`universal_set` keeps the keys whose score reaches ε, or the k best.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Public name -> the module it lives in. Nothing is imported until it is asked for.
_HOME = {
    "ConvergenceError": "errors",
    "Gram": "gram",
    "HeavyIndex": "heavy",
    "Hits": "heavy",
    "KeyStream": "stream",
    "Huber": "losses",
    "Grid": "local",
    "LevAttention": "nn",
    "Power": "losses",
    "Softmax": "losses",
    "Tukey": "losses",
    "UniversalSet": "universal",
    "attend": "attention",
    "heavy_keys": "heavy",
    "leverage_scores": "scorers.leverage",
    "online_universal_set": "online",
    "two_pass": "passes",
    "lewis_weights": "scorers.lewis",
    "sensitivities": "scorers.sensitivity",
    "universal_set": "universal",
    "witness": "scorers.leverage",
}
_MODULES = (
    "adversary",
    "distributed",
    "features",
    "integrations",
    "normaliser",
    "planted",
    "residuals",
    "scorers",
    "sketches",
    "vision",
)

__all__ = [*_HOME, *_MODULES]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from levattention import adversary as adversary
    from levattention import distributed as distributed
    from levattention import features as features
    from levattention import integrations as integrations
    from levattention import normaliser as normaliser
    from levattention import planted as planted
    from levattention import residuals as residuals
    from levattention import scorers as scorers
    from levattention import sketches as sketches
    from levattention import vision as vision
    from levattention.attention import attend as attend
    from levattention.errors import ConvergenceError as ConvergenceError
    from levattention.gram import Gram as Gram
    from levattention.heavy import HeavyIndex as HeavyIndex
    from levattention.heavy import Hits as Hits
    from levattention.heavy import heavy_keys as heavy_keys
    from levattention.local import Grid as Grid
    from levattention.losses import Huber as Huber
    from levattention.losses import Power as Power
    from levattention.losses import Softmax as Softmax
    from levattention.losses import Tukey as Tukey
    from levattention.nn import LevAttention as LevAttention
    from levattention.online import online_universal_set as online_universal_set
    from levattention.passes import two_pass as two_pass
    from levattention.scorers.leverage import leverage_scores as leverage_scores
    from levattention.scorers.leverage import witness as witness
    from levattention.scorers.lewis import lewis_weights as lewis_weights
    from levattention.scorers.sensitivity import sensitivities as sensitivities
    from levattention.stream import KeyStream as KeyStream
    from levattention.universal import UniversalSet as UniversalSet
    from levattention.universal import universal_set as universal_set


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"levattention.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"levattention.{name}")
    raise AttributeError(f"module 'levattention' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
