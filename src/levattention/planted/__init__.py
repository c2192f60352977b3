"""The planted model of section 4: queries that mix a few stand-out keys, and how to find which.

`generate` and `near_orthogonal` draw keys with a stand-out set S; `check` measures whether the model's assumptions
hold for keys and a set; `queries` builds queries that satisfy theirs; `recover` prepares keys once, and its
`relevant_keys` then names S(q) at a cost that does not depend on n.
"""

from levattention.planted.assumptions import Assumptions, check
from levattention.planted.model import Planted, generate, near_orthogonal
from levattention.planted.query import Queries, queries
from levattention.planted.recovery import JL, Recovery, recover

__all__ = [
    "JL",
    "Assumptions",
    "Planted",
    "Queries",
    "Recovery",
    "check",
    "generate",
    "near_orthogonal",
    "queries",
    "recover",
]
