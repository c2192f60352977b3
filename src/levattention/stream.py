"""One pass over keys that arrive in blocks: what can still matter is kept, everything else is dropped for good.

Adding rows never raises a sensitivity, so a row whose score against the keys so far is under ε can be forgotten. What
is kept after each prune is at most rank/ε rows, whatever the order, the scale or the condition number of the stream.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from levattention.candidates import Candidates
from levattention.checks import require_eps, require_finite_block, require_keys
from levattention.gram import heads_first
from levattention.losses import Loss, Power, from_config, to_config
from levattention.online_weights import sieve_for
from levattention.sieves import Sieve
from levattention.statefile import load_state, save_state
from levattention.universal import UniversalSet, capacity, select_positions

# Elements gathered before a block is worked off: enough to pay for one factorisation.
_BLOCK = 1 << 21


class KeyStream:
    """The universal set of a stream of keys, in one pass.

    Args:
        d: width of the keys.
        eps: threshold in (0, 1].
        loss: f.
        start: position of the first row. Streams that are given theirs keep global positions when merged; without
            it, the rows of a merged stream follow this one's.
        batch: leading dimensions of every block; heads are batch.
        device: where the state lives.

    Example:
        >>> keys = torch.cat([torch.randn(5000, 3) * 0.01, torch.eye(3)])
        >>> stream = KeyStream(3, eps=0.5)
        >>> for block in keys.split(700):
        ...     stream.update(block)
        >>> u = stream.finish()
        >>> sorted(u.index[u.valid].tolist()), stream.rows.shape
        ([5000, 5001, 5002], torch.Size([3, 3]))
    """

    def __init__(
        self,
        d: int,
        *,
        eps: float,
        loss: Loss = Power(2),  # noqa: B008 (frozen)
        start: int | None = None,
        batch: tuple[int, ...] = (),
        device: torch.device | str | None = None,
    ) -> None:
        if d < 1:
            raise ValueError(f"d: expected at least 1, got {d}")
        if start is not None and start < 0:
            raise ValueError(f"start: expected a position >= 0, got {start}")
        self.d, self.eps, self.loss, self.start, self.batch = d, require_eps(eps), loss, start, tuple(batch)
        self.count = 0
        self.end = start or 0
        self._device = torch.device("cpu" if device is None else device)
        self._sieve: Sieve = sieve_for(loss, d, math.prod(self.batch), self._device, self.eps)
        self._kept: Candidates | None = None
        self._pending: list[Candidates] = []
        self._waiting = 0
        self._seen = {"scored": 0, "spared": 0, "prunes": 0, "peak": 0}

    def update(self, block: Tensor, payload: Tensor | None = None) -> None:
        """Read a block of rows (*batch, m, d), of any length; `payload` (*batch, m, ...) is kept with its rows.

        Raises:
            ValueError: wrong width or batch, not floating, or not finite: names the row by its position. The stream
                is left as it was.
        """
        if block.ndim >= 2 and block.shape[-2] == 0:
            return
        require_keys(block, "block")
        if (*block.shape[:-2], block.shape[-1]) != (*self.batch, self.d):
            raise ValueError(f"block: expected shape {(*self.batch, 'm', self.d)}, got {tuple(block.shape)}")
        require_finite_block(block, self.end)
        if payload is not None and payload.shape[: block.ndim - 1] != block.shape[:-1]:
            raise ValueError(f"payload: expected shape {(*block.shape[:-1], '...')}, got {tuple(payload.shape)}")
        rows = heads_first(block.detach()).to(self._device)
        carried = None if payload is None else payload.reshape(*rows.shape[:2], *payload.shape[block.ndim - 1 :])
        known = self._pending[0] if self._pending else self._kept
        if known is not None and known.rows.shape[1] and (known.payload is None) != (payload is None):
            raise ValueError("payload: expected with every block or with none")
        wide = self._sieve.width
        size = max(4 * wide, _BLOCK // (wide * rows.shape[0]))
        for first in range(0, rows.shape[1], size):
            part = rows[:, first : first + size]
            extra = None if carried is None else carried[:, first : first + size].to(self._device)
            if self._waiting and self._waiting + part.shape[1] > size:
                self._work_off()
            # The block may be the caller's buffer, which he is free to overwrite: what waits must be a copy.
            waits = part.shape[1] < size
            self._pending.append(Candidates.of(part.clone() if waits else part, self.end, extra))
            self._waiting += part.shape[1]
            self.end += part.shape[1]
            self.count += part.shape[1]
            if self._waiting >= size:
                self._work_off()

    def merge(self, other: KeyStream) -> None:
        """Take in all that another stream has seen. The other stream is worked off, but otherwise unchanged.

        Raises:
            ValueError: a stream of another width, threshold, loss or batch.
        """
        mine, theirs = (self.d, self.eps, self.loss, self.batch), (other.d, other.eps, other.loss, other.batch)
        if mine != theirs:
            raise ValueError(f"merge: expected a stream with (d, eps, loss, batch) = {mine}, got {theirs}")
        self._work_off()
        other._work_off()
        shift = self.end if other.start is None else 0
        self._sieve.merge(other._sieve)
        self.count += other.count
        for name in ("scored", "spared", "prunes"):
            self._seen[name] += other._seen[name]
        self._seen["peak"] = max(self._seen["peak"], other._seen["peak"])
        self.end = max(self.end, other.end + shift)
        if other._kept is not None:
            self._prune(other._kept.to(self._device).shifted(shift))

    def settle(self) -> None:
        """Work off the rows that wait for a full block."""
        self._work_off()

    def finish(self) -> UniversalSet:
        """The universal set of all rows so far; `index` holds positions in the stream. More rows may follow.

        Raises:
            ValueError: no row has come yet.
        """
        self._work_off()
        if self.count == 0 or self._kept is None:
            raise ValueError("finish: expected at least one row, the stream is empty")
        kept = self._kept
        scores = self._sieve.scores(kept.rows, self.eps).masked_fill(~kept.valid, 0.0)
        cap = capacity(self._sieve.total(self.count), self.eps, self.count)
        found = select_positions(scores, kept.positions, self.eps, cap)
        slots = {name: self._unbatch(getattr(found, name)) for name in ("index", "valid", "scores", "eps")}
        return UniversalSet(**slots, rank=self._unbatch(self._sieve.rank()), route=self._sieve.route)

    @property
    def rows(self) -> Tensor:
        """The kept keys, (kept, d); with a batch (*batch, kept, d), zero rows where a head keeps fewer."""
        return self._unbatch(self.candidates.rows * self.candidates.valid.unsqueeze(-1))

    @property
    def positions(self) -> Tensor:
        """Positions of the kept keys; -1 where a head keeps fewer than others."""
        return self._unbatch(self.candidates.positions.masked_fill(~self.candidates.valid, -1))

    @property
    def payload(self) -> Tensor | None:
        """What came with the kept keys."""
        return None if self.candidates.payload is None else self._unbatch(self.candidates.payload)

    @property
    def candidates(self) -> Candidates:
        """The rows that can still matter, after working off what waits."""
        self._work_off()
        if self._kept is None:
            return Candidates.of(torch.zeros(math.prod(self.batch), 0, self.d, device=self._device), 0)
        return self._kept

    @property
    def size(self) -> int:
        """How many rows the fullest head has kept, not counting those that wait."""
        kept = self._kept
        return int(kept.valid.sum(-1).max()) if kept is not None and kept.valid.numel() else 0

    def stats(self) -> dict[str, Any]:
        """Rows seen, kept now and at most, and the share that the cheap screen spared from scoring."""
        self.settle()
        judged = self._seen["scored"] + self._seen["spared"]
        return {
            "rows": self.count,
            "kept": self.size,
            "peak": self._seen["peak"],
            "prunes": self._seen["prunes"],
            "spared": self._seen["spared"] / judged if judged else 0.0,
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that must be remembered, as tensors and as what fits JSON; kept rows without padding."""
        kept = self.candidates
        tensors = {f"sieve.{name}": tensor for name, tensor in self._sieve.state().items()}
        tensors |= {"rows": kept.rows[kept.valid], "positions": kept.positions, "valid": kept.valid}
        if kept.payload is not None:
            tensors["payload"] = kept.payload[kept.valid]
        config = {"d": self.d, "eps": self.eps, "loss": to_config(self.loss), "start": self.start, "batch": self.batch}
        return tensors, config | {"end": self.end, "count": self.count, "seen": self._seen}

    @classmethod
    def of_state(cls, tensors: dict[str, Tensor], config: dict[str, Any], device: torch.device | str) -> KeyStream:
        """The stream whose `state` this is, ready for more rows."""
        stream = cls(
            config["d"],
            eps=config["eps"],
            loss=from_config(config["loss"]),
            start=config["start"],
            batch=tuple(config["batch"]),
            device=device,
        )
        stream.restore(tensors, config)
        return stream

    def restore(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Take up the state of a stream with the same d, eps, loss and batch."""
        self.start, self.end, self.count, self._seen = (config[name] for name in ("start", "end", "count", "seen"))
        self._kept, self._pending, self._waiting = None, [], 0
        prefix = "sieve."
        self._sieve.restore({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        if self.count == 0:
            return
        valid = tensors["valid"]

        def padded(values: Tensor) -> Tensor:
            slots = values.new_zeros((*valid.shape, *values.shape[1:]))
            slots[valid] = values
            return slots

        payload = tensors.get("payload")
        carried = None if payload is None else padded(payload)
        self._kept = Candidates(padded(tensors["rows"]), tensors["positions"], valid, carried)

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file, replaced whole or not at all."""
        save_state(path, "stream", *self.state())

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> KeyStream:
        """The stream that `save` wrote, ready for more rows."""
        return cls.of_state(*load_state(path, "stream", device), device)

    def _unbatch(self, values: Tensor) -> Tensor:
        return values.reshape((*self.batch, *values.shape[1:]))

    def _work_off(self) -> None:
        """Add the waiting rows to the summary, then drop what can no longer matter."""
        if not self._waiting:
            return
        block = self._pending[0]
        for part in self._pending[1:]:
            block = block.join(part)
        self._pending, self._waiting = [], 0
        self._sieve.update(block.rows)
        spared = self._sieve.spares(block.rows, self.eps)
        fresh = block.only(~spared)
        self._seen["spared"] += int(spared.sum())
        self._seen["scored"] += int(fresh.valid.sum())
        self._prune(fresh)

    def _prune(self, fresh: Candidates) -> None:
        # Each side is cut before they are joined, so that a block is never copied for the few rows it leaves behind.
        fresh = fresh.only(~self._sieve.dismisses(fresh.rows, self.eps))
        cut = [
            pool.only(self._sieve.survivors(pool.rows, self.eps)) for pool in (self._kept, fresh) if pool is not None
        ]
        self._kept = cut[0] if len(cut) == 1 else cut[0].join(cut[1])
        self._seen["prunes"] += 1
        self._seen["peak"] = max(self._seen["peak"], self.size)
