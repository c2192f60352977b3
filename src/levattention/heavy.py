"""Heavy queries: every key that a query gives weight ≥ ε, with that weight, in time that does not depend on n."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from levattention._shapes import Bool, Float64, Int64
from levattention.checks import FLOATS, require_eps, require_finite, require_keys
from levattention.csr import csr_rows, is_csr
from levattention.features import KeyMap, map_keys
from levattention.gram import CPU_TILE, GPU_TILE, Advance
from levattention.losses import Huber, Loss, Power, Tukey, from_config, to_config
from levattention.normaliser import Exact, FittedNormaliser, Normaliser, default_normaliser, restore
from levattention.scorers import Scorer
from levattention.scorers.leverage import factor_keys
from levattention.statefile import load_state, save_state
from levattention.universal import UniversalSet, capacity, default_scorer, reaches, universal_set

# Below it a number has lost digits, and its reciprocal overflows.
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Hits:
    """The heavy keys of each query, heaviest first.

    Attributes:
        index: positions of the keys, int64; 0 in slots that are not valid.
        weight: f(⟨q, k⟩)/Z, fp64; 0 in slots that are not valid.
        valid: which slots hold a key.
        undefined: queries that give no key any weight (zero, or orthogonal to all keys): they have no hits.
    """

    index: Int64[Tensor, "*batch m c"]
    weight: Float64[Tensor, "*batch m c"]
    valid: Bool[Tensor, "*batch m c"]
    undefined: Bool[Tensor, "*batch m"]

    def warned(self) -> Hits:
        """These hits, after a warning where there are undefined queries."""
        count = int(self.undefined.sum())
        if count:
            first = self.undefined.nonzero()[0].tolist()
            place = f"{first[-1]}" + (f" of batch element {tuple(first[:-1])}" if len(first) > 1 else "")
            warnings.warn(
                f"queries: {count} give no key any weight (zero, or orthogonal to all keys), the first is row {place}; "
                "nothing is returned for them",
                stacklevel=3,
            )
        return self


def joined(parts: list[Hits]) -> Hits:
    """The hits of successive queries as one."""
    index, weight, valid = (
        torch.cat([getattr(part, name) for part in parts], -2) for name in ("index", "weight", "valid")
    )
    return Hits(index, weight, valid, torch.cat([part.undefined for part in parts], -1))


class HeavyIndex:
    """All keys of weight ≥ ε of any query: the universal set, and a normaliser for the sum over all keys.

    A key outside U never reaches ε (Theorem thm:main-intro of the paper), so U's scores and Z(q) = Σⱼ f(⟨q, kⱼ⟩) settle
    a query in O(|U|·d) besides Z. With an exact normaliser the answer is {j : Aⱼ ≥ ε} with exact weights. With one that
    is within 1 ± δ every such key comes back too, with a weight within 1/(1 ± δ), and perhaps some
    keys of true weight ≥ ε(1−δ)/(1+δ).

    Args:
        keys: (*batch, n, d); heads are batch. They are not kept.
        eps: threshold in (0, 1].
        loss: Power, Huber or Tukey.
        normaliser: a factory of `levattention.normaliser`; by default exact where it exists and fits, and otherwise
            sampled, with a warning.
        key_map: φ, applied to the keys.
        query_map: ψ, applied to the queries; without it they must be as wide as φ(K).
        scorer: how U is found; by default the certified one for the loss.
        advance: told how many rows were read, for a progress bar: two or three times all for x², then once for Z.

    Raises:
        ValueError: bad keys, eps or loss; a normaliser that does not go with the loss, or does not fit.

    Example:
        >>> keys = torch.cat([torch.randn(5000, 3, generator=torch.Generator().manual_seed(0)) * 0.01, torch.eye(3)])
        >>> index = HeavyIndex(keys, eps=0.25)
        >>> hits = index(torch.tensor([[1.0, 0.0, 0.0]]))
        >>> hits.index[hits.valid].tolist(), round(hits.weight[hits.valid].item(), 1)
        ([5000], 0.7)
    """

    def __init__(
        self,
        keys: Tensor,
        eps: float,
        loss: Loss = Power(2),  # noqa: B008 (frozen)
        normaliser: Normaliser | None = None,
        key_map: KeyMap | None = None,
        query_map: KeyMap | None = None,
        *,
        scorer: Scorer | None = None,
        advance: Advance | None = None,
    ) -> None:
        require_keys(keys)
        eps = require_eps(eps)
        if not isinstance(loss, Power | Huber | Tukey):
            raise ValueError(f"loss: expected Power, Huber or Tukey, got {loss!r}")
        if normaliser is not None and (isinstance(normaliser, type) or not callable(normaliser)):
            raise ValueError(f"normaliser: expected one of levattention.normaliser, got {normaliser!r}")
        features = map_keys(key_map, keys)
        scorer = default_scorer(loss) if scorer is None else scorer
        found = universal_set(features, eps=eps, loss=loss, scorer=scorer, advance=advance)
        used = max(1, int(found.size.max()))
        slots = {name: getattr(found, name)[..., :used] for name in ("index", "valid", "scores")}
        self.universal = UniversalSet(**slots, eps=found.eps, rank=found.rank, condition=found.condition)
        self.rows = self.universal.rows(features).double()
        self.eps, self.query_map = eps, query_map
        self.loss: Loss = loss
        self.n, self.width = features.shape[-2:]
        self.rank = factor_keys(features)[0].rank if found.rank is None else found.rank
        # How many keys the theory allows, which is what the set was sized by.
        self.bound = capacity(scorer.bound(self.width, self.n), eps, self.n)  # type: ignore[attr-defined]
        chosen = default_normaliser(features, loss) if normaliser is None else normaliser
        self.normaliser: FittedNormaliser = (
            chosen(features, loss, advance) if isinstance(chosen, Exact) else chosen(features, loss)
        )
        if normaliser is None and not isinstance(chosen, Exact):
            warnings.warn(
                f"normaliser: no exact one fits {loss} over {self.n:,} × {self.width} keys; fell back to one "
                f"{self.normaliser.guarantee}",
                stacklevel=2,
            )
        self._prepare()

    def _prepare(self) -> None:
        """What every query needs and no file holds."""
        self._floor = self.eps / (1 + self.normaliser.guarantee.delta)
        # Z is never less than the sum over U, so the weights of a query sum to at most 1.
        self._slots = min(self.rows.shape[-2], capacity(1.0, self._floor, self.n))
        self._mapped = self.query_map is not None
        size = self.normaliser.magnitude
        self._scale = torch.where(size >= TINY, torch.frexp(size).mantissa / size, 1.0)[..., None, None]

    def __call__(self, queries: Tensor, *, quiet: bool = False) -> Hits:
        """The heavy keys of every query, queries (*batch, m, d) -> (*batch, m, c); c ≤ 1/ε is the same for all queries.

        Queries that give no key any weight get no hits; a warning says how many, unless it is to be quiet.

        Raises:
            ValueError: queries of another width or batch, not floating, or not finite: names the first bad row.
        """
        queries = self.check(queries).to(self.rows.device)
        tile = CPU_TILE if queries.device.type == "cpu" else GPU_TILE
        heads = max(1, self.rows[..., 0, 0].numel())
        step = max(1, 4 * tile // (heads * (self.rows.shape[-2] + self.normaliser.work)))
        blocks = [self._answer(block) for block in queries.split(step, -2)]
        hits = blocks[0] if len(blocks) == 1 else joined(blocks)
        return hits if quiet else hits.warned()

    def check(self, queries: Tensor) -> Tensor:
        """The queries in the space of the features, once they are known to fit.

        Raises:
            ValueError: see `__call__`.
        """
        if not isinstance(queries, Tensor) or queries.ndim < 2 or queries.dtype not in FLOATS:
            came = tuple(queries.shape) if isinstance(queries, Tensor) else type(queries).__name__
            kind = f" of {queries.dtype}" if isinstance(queries, Tensor) else ""
            raise ValueError(f"queries: expected floats of shape (*batch, m, d), got {came}{kind}")
        # A sum is cheaper than a test of every entry, and no bad entry leaves it finite.
        if not queries.sum(dtype=torch.float64).isfinite():
            require_finite(queries, "queries")
        if self._mapped:
            queries = map_keys(self.query_map, queries, "query_map")
        if (*queries.shape[:-2], queries.shape[-1]) != (*self.rows.shape[:-2], self.width):
            expected = (*self.rows.shape[:-2], "m", self.width)
            raise ValueError(f"queries: expected shape {expected}, got {tuple(queries.shape)}")
        return queries

    def _answer(self, queries: Tensor) -> Hits:
        """One block of queries."""
        queries = queries.double()
        if isinstance(self.loss, Power) and self.loss.p != 2:
            # High powers overflow. Scaling leaves the weights as they are, and a power of two leaves q's digits.
            size = queries.abs().amax(-1, keepdim=True)
            mantissa, _ = torch.frexp(size)
            queries = queries * (torch.where(size >= TINY, mantissa / size, 1.0) * self._scale)
        values = self.loss(queries @ self.rows.mT)
        total = torch.maximum(self.normaliser(queries), values.sum(-1))
        undefined = total <= 0
        heaviest = values.topk(self._slots)
        weight = heaviest.values / torch.where(undefined, 1.0, total).unsqueeze(-1)
        valid = reaches(weight, self._floor)
        index = self.universal.index.unsqueeze(-2).expand(values.shape).gather(-1, heaviest.indices)
        return Hits(index * valid, weight * valid, valid, undefined)

    def stats(self) -> dict[str, Any]:
        """n, d, rank, |U| (`size`), its bound, bytes held, and what the normaliser guarantees."""
        return {
            "n": self.n,
            "d": self.width,
            "batch": list(self.rows.shape[:-2]),
            "loss": str(self.loss),
            "eps": self.eps,
            "rank": self.rank.tolist(),
            "size": self.universal.size.tolist(),
            "bound": self.bound,
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values()),
            "normaliser": str(self.normaliser.guarantee),
        }

    def _tensors(self) -> dict[str, Tensor]:
        """All that is held and saved."""
        held = {name: getattr(self.universal, name) for name in ("index", "valid", "scores", "eps")}
        fitted, _ = self.normaliser.state()
        return held | {"keys": self.rows, "rank": self.rank} | {f"normaliser.{name}": t for name, t in fitted.items()}

    def save(self, path: str | Path) -> None:
        """Write the index to a safetensors file, replaced whole or not at all; of maps only that there was one."""
        _, plain = self.normaliser.state()
        config = {"eps": self.eps, "loss": to_config(self.loss), "n": self.n, "bound": self.bound, "normaliser": plain}
        save_state(path, "index", self._tensors(), config | {"query_map": self.query_map is not None})

    @classmethod
    def load(
        cls, path: str | Path, *, query_map: KeyMap | None = None, device: torch.device | str = "cpu"
    ) -> HeavyIndex:
        """The index that `save` wrote.

        Args:
            path: the file.
            query_map: ψ, where the index was built with one: functions are not saved.
            device: where it is to live.

        Raises:
            ValueError: a file that is missing, truncated, not ours or of another version; a map too few or too many.
        """
        tensors, config = load_state(path, "index", device)
        try:
            index = cls.__new__(cls)
            index.universal = UniversalSet(tensors["index"], tensors["valid"], tensors["scores"], tensors["eps"])
            index.rows, index.rank = tensors["keys"], tensors["rank"]
            index.eps, index.loss = config["eps"], from_config(config["loss"])
            index.n, index.width, index.bound = config["n"], index.rows.shape[-1], config["bound"]
            fitted = {
                name.removeprefix("normaliser."): t for name, t in tensors.items() if name.startswith("normaliser.")
            }
            index.normaliser = restore(fitted, config["normaliser"])
            mapped = config["query_map"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a readable levattention index ({error!r})") from None
        if mapped != (query_map is not None):
            raise ValueError(
                f"query_map: the index was built {'with' if mapped else 'without'} one, and so must be loaded"
            )
        index.query_map = query_map
        index._prepare()
        return index


def heavy_keys(
    keys: Tensor,
    q: Tensor,
    eps: float,
    loss: Loss = Power(2),  # noqa: B008 (frozen)
) -> Int64[Tensor, " c"]:
    """LA(K, ε, q) = {j : f(⟨q, kⱼ⟩) ≥ ε·Σₗ f(⟨q, kₗ⟩)}, in order of position, by brute force over all keys.

    The reference for `HeavyIndex`. A query that gives no key any weight has no heavy keys.

    Args:
        keys: (n, d).
        q: (d,).
        eps: threshold in (0, 1].
        loss: f.

    Raises:
        ValueError: bad keys, a query of another width or not finite, eps outside (0, 1].

    Example:
        >>> heavy_keys(torch.eye(3), torch.tensor([3.0, 4.0, 0.0]), eps=0.5)
        tensor([1])
    """
    require_keys(keys)
    eps = require_eps(eps)
    require_finite(keys)
    n, d = keys.shape[-2:]
    if keys.ndim != 2:
        raise ValueError(f"keys: expected one head (n, d), got shape {tuple(keys.shape)}")
    if not isinstance(q, Tensor) or q.shape != (d,):
        raise ValueError(
            f"q: expected shape ({d},), got {tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__}"
        )
    require_finite(q.unsqueeze(0), "q")
    values = torch.empty(n, dtype=torch.float64, device=keys.device)
    for start in range(0, n, max(1, CPU_TILE // d)):
        span = slice(start, min(start + max(1, CPU_TILE // d), n))
        block = csr_rows(keys, span) if is_csr(keys) else keys[span].double()
        values[span] = loss(block @ q.double())
    total = values.sum()
    return (reaches(values, eps * total) & (total > 0)).nonzero().squeeze(-1)
