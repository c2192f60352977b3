"""The queries, keys and values of attention heads, and the walks over the queries: at once, in blocks, in chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from levattention import kernels
from levattention._shapes import Bool, Float
from levattention.causal import RunningSet, sets_at_once
from levattention.local import Grid, Window, positions
from levattention.losses import Loss, Power
from levattention.residuals import chosen_slots
from levattention.select import Choice
from levattention.slots import Part, Slots, attend_rows, in_order, merge, own_group, places, regrouped
from levattention.universal import UniversalSet

# Queries that share one look at their local keys, and the default size of a causal chunk.
BLOCK = 256


@dataclass(frozen=True)
class Head:
    """What one call attends with. The `groups` query heads of a key head share its keys.

    Attributes:
        queries: one row a query; query i stands at position i + n − m.
        k: the keys.
        v: the values.
        mask: which keys may be seen.
        scale: factor of the inner products.
        loss: f; None for softmax.
        dropout_p: probability of dropping a weight.
    """

    queries: Float[Tensor, "*batch groups m d"]
    k: Float[Tensor, "*batch n d"]
    v: Float[Tensor, "*batch n e"]
    mask: Bool[Tensor, "*batch n"]
    scale: float
    loss: Loss | None
    dropout_p: float

    @property
    def shift(self) -> int:
        """The position of the first query."""
        return self.k.shape[-2] - self.queries.shape[-2]

    def cleaned(self) -> Head:
        """The same with zeros in place of keys and values that may not be seen, whatever they hold."""
        seen = self.mask.unsqueeze(-1)
        return replace(self, k=torch.where(seen, self.k, 0.0), v=torch.where(seen, self.v, 0.0))

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, the groups of a key head one after the other."""
        return self.queries.flatten(-3, -2), self.k, self.v

    def query_mask(self) -> Tensor:
        """Which rows of `rows` are real queries: with as many queries as keys, those whose key may be seen."""
        groups, m = self.queries.shape[-3:-1]
        real = self.mask if m == self.k.shape[-2] else self.mask.new_ones(*self.mask.shape[:-1], m)
        return real.repeat(*[1] * (real.ndim - 1), groups)

    def fused(self, groups: int | None = None) -> bool:
        """Whether the kernels can attend: softmax of (B, H, ...) tensors of one type and width, no dropout.

        With so many groups of queries to a key head; by default those that it has.
        """
        k, v = self.k, self.v
        alike = k.ndim == 4 and k.shape == v.shape and self.queries.dtype == k.dtype == v.dtype
        few = math.prod(k.shape[:-2]) * (groups or self.queries.shape[-3]) <= kernels.MAX_HEADS
        return alike and few and self.loss is None and self.dropout_p == 0 and kernels.preferred(k)

    def best_at_once(self, choice: Choice | None, masked: bool) -> Part | None:
        """Every query over the best keys, of which the kernels keep the positions alone; None where they cannot.

        Unless the head is `masked`, its mask is not looked at. What may not be seen may hold anything.
        """
        if choice is None or choice.top_k is None or not (self.fused() and choice.by_kernels(self.k)):
            return None
        mask = self.mask if masked else None
        index = kernels.select(self.k, choice.top_k, mask)
        return self._gathered(self.k, self.v, index, valid=None if mask is None else mask.gather(-1, index))

    def over_keys(self, chosen: UniversalSet, every_slot_valid: bool) -> Part:
        """Every query over the chosen keys, gathered inside the kernel."""
        return self._gathered(self.k, self.v, chosen.index, valid=None if every_slot_valid else chosen.valid)

    def over(self, slots: Slots, band: Window | None) -> Part:
        """Every query over the same slots, and over its own local keys."""
        m, n = self.queries.shape[-2], self.k.shape[-2]
        if band is None:
            return self._over_slots(slots)
        parts = []
        for start in range(0, m, max(BLOCK, band.reach)):
            rows = slice(start, min(start + max(BLOCK, band.reach), m))
            first = min(max(start + self.shift - band.reach, 0), n - 1)
            span = slice(first, max(min(rows.stop + self.shift + band.reach, n), first + 1))
            near = band.near(self._places(rows), positions(span, self.k.device))
            parts.append(self._see(rows, slots, span, near))
        return join(parts)

    def _over_slots(self, slots: Slots) -> Part:
        """Every query over its slots alone, by the kernel where it can."""
        order = slots.order
        flat = self.queries.flatten(-3, -2)
        queries = self.queries if order is None else regrouped(flat, order)
        if self.fused(None if order is None else order.shape[-2]):
            keys, values, log_weight = slots.keys.to(self.k.dtype), slots.values.to(self.k.dtype), slots.log_weight
            if order is not None:
                keys, values, log_weight = (rows.flatten(1, 2) for rows in (keys, values, log_weight))
            every = torch.arange(keys.shape[-2], device=keys.device).expand(keys.shape[:-1])
            part = self._gathered(keys, values, every, log_weight, queries=queries)
        elif order is None:
            part = self._see(slice(0, self.queries.shape[-2]), slots, slice(0))
        else:
            queries, weight = queries.to(slots.keys.dtype), slots.log_weight.unsqueeze(-2)
            part = attend_rows(queries, slots.keys, slots.values, weight, **self._how())
        if order is None:
            return part
        part, heads = in_order(part, order, flat.shape[-2]), self.queries.shape[-3:-1]
        return Part(part.out.unflatten(-2, heads), part.lse.unflatten(-1, heads))

    def causal(
        self, running: RunningSet | None, fixed: UniversalSet | None, band: Window | None, chunk: int
    ) -> tuple[Part, list[UniversalSet | None]]:
        """Each chunk of queries over its own causal block, its local keys, and the set of the keys before it."""
        m, n = self.queries.shape[-2], self.k.shape[-2]
        parts: list[Part] = []
        sets: list[UniversalSet | None] = []
        read = 0
        for start in range(0, m, chunk):
            rows = slice(start, min(start + chunk, m))
            before = max(start + self.shift, 0)
            if running is not None and before > read:
                running.read(read, before)
                read = before
            kept = running.chosen if running is not None else until(fixed, before)
            first = min(max(before - (0 if band is None else band.reach), 0), n - 1)
            span = slice(first, max(rows.stop + self.shift, first + 1))
            i, j = self._places(rows), positions(span, self.k.device)
            near = (j >= before).expand(len(i), -1) if band is None else (j >= before) | band.near(i, j)
            slots = None if kept is None else chosen_slots(self.k, self.v, kept)
            parts.append(self._see(rows, slots, span, near & (j <= i.unsqueeze(-1))))
            sets.append(kept)
        return join(parts), sets

    def causal_at_once(
        self, choice: Choice | None, fixed: UniversalSet | None, band: Window | None, chunk: int, masked: bool
    ) -> Part | None:
        """The same by the kernels, all chunks in one launch; None where they cannot.

        Unless the head is `masked`, its mask is not looked at. What may not be seen may hold anything.
        """
        if not self.fused() or self.shift < 0 or isinstance(band, Grid):
            return None
        mask = self.mask if masked else None
        sets = sets_at_once(self.k.detach(), mask, choice, fixed, chunk, self.shift)
        if sets is None:
            return None
        queries, heads = self.queries.flatten(1, 2), self.queries.shape[1:3]
        reach = 0 if band is None else band.reach
        out, lse = kernels.causal_attention(
            queries, self.k, self.v, *sets, chunk=chunk, reach=reach, scale=self.scale, mask=mask
        )
        return Part(out.unflatten(1, heads), lse.unflatten(1, heads))

    def full(self, is_causal: bool, masked: bool) -> Part:
        """Every query over every key that it may see. Softmax: PyTorch's kernels, which give no lse (NaN)."""
        m, n = self.queries.shape[-2], self.k.shape[-2]
        # What may not be seen may hold NaN, which a mask of the logits does not stop.
        head = self.cleaned() if masked else self
        seen = self.mask.unsqueeze(-2)
        if is_causal:
            seen = seen & torch.ones(m, n, dtype=torch.bool, device=self.k.device).tril(self.shift)
        if self.loss is not None:
            return head._see(slice(0, m), None, slice(0, n), seen.expand(*self.mask.shape[:-1], m, n))
        groups = self.queries.shape[-3]
        queries, k, v = self.queries.flatten(-4, -3) if groups > 1 else self.queries.squeeze(-3), head.k, head.v
        if groups > 1:
            k, v, seen = (rows.repeat_interleave(groups, -3) for rows in (k, v, seen))
        explicit = masked or (is_causal and m != n)
        out = scaled_dot_product_attention(
            queries,
            k,
            v,
            attn_mask=seen if explicit else None,
            dropout_p=self.dropout_p,
            is_causal=is_causal and not explicit,
            scale=self.scale,
        )
        if explicit:
            out = torch.where(seen.any(-1, keepdim=True), out, 0.0)
        out = out.reshape(*self.queries.shape[:-1], v.shape[-1])
        return Part(out, out.new_full(out.shape[:-1], torch.nan))

    def normalised(self, part: Part) -> Tensor:
        """The part's weighted sum over Σⱼ f(scale·q·kⱼ) of all visible keys, in place of the sum over its own.

        For f = x² that sum is ‖Kq‖² = qᵀ(KᵀK)q, from the d × d Gram; for higher even powers it is taken key by key.
        """
        keys, queries = self.k.double(), self.queries.flatten(-3, -2).double() * self.scale
        assert isinstance(self.loss, Power)  # even powers alone come here
        if self.loss.p == 2:
            total = ((queries @ (keys.mT @ keys)) * queries).sum(-1)
        else:
            blocks = keys.split(BLOCK, -2)
            total = torch.stack([self.loss(queries @ block.mT).sum(-1) for block in blocks]).sum(0)
        total = total.unflatten(-1, self.queries.shape[-3:-1])
        seen = (total > 0) & (part.lse > -torch.inf)
        share = torch.where(seen, part.lse, 0.0).double().exp() / torch.where(seen, total, 1.0)
        return part.out * torch.where(seen, share, 0.0).unsqueeze(-1).to(part.out.dtype)

    def _gathered(
        self,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        log_weight: Tensor | None = None,
        *,
        valid: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> Part:
        """Queries (the head's, or others in groups) over rows of k and v by the kernel, which knows no groups."""
        queries = self.queries if queries is None else queries
        heads = queries.shape[1:3]
        out, lse = kernels.gathered_attention(
            queries.flatten(1, 2), k, v, index, log_weight, scale=self.scale, valid=valid
        )
        return Part(out.unflatten(1, heads), lse.unflatten(1, heads))

    def _how(self) -> dict[str, Any]:
        """What every look at rows has in common."""
        return {"scale": self.scale, "loss": self.loss, "dropout_p": self.dropout_p}

    def _places(self, rows: slice) -> Tensor:
        """The positions of some queries."""
        return positions(slice(rows.start + self.shift, rows.stop + self.shift), self.k.device)

    def _see(self, rows: slice, slots: Slots | None, span: slice, near: Bool[Tensor, "*_ s"] | None = None) -> Part:
        """Some queries over the slots, and over the keys of the span that are near them; no key counts twice."""
        queries = self.queries[..., rows, :]
        groups, m = queries.shape[-3:-1]
        dtype = torch.promote_types(queries.dtype, torch.float32)
        flat = queries.flatten(-3, -2).to(dtype)
        parts = []
        if near is not None:
            near = near.repeat(*[1] * (near.ndim - 2), groups, 1)
            weight = torch.where(near & self.mask[..., None, span], 0.0, -torch.inf).to(dtype)
            k, v = self.k[..., span, :].to(dtype), self.v[..., span, :].to(dtype)
            parts.append(attend_rows(flat, k, v, weight, **self._how()))
        if slots is not None:
            weight = slots.log_weight.unsqueeze(-2) if near is None else slots.without(near, span)
            if slots.order is None:
                parts.append(attend_rows(flat, slots.keys, slots.values, weight, **self._how()))
            else:
                # A window of queries holds some of every group: they all look at the slots of each.
                every = attend_rows(flat.unsqueeze(-3), slots.keys, slots.values, weight, **self._how())
                heads = self.queries.shape[-3:-1]
                group = places(slots.order, math.prod(heads)) // slots.order.shape[-1]
                parts.append(own_group(every, group.unflatten(-1, heads)[..., rows].flatten(-2)))
        part = merge(parts)
        return Part(part.out.unflatten(-2, (groups, m)), part.lse.unflatten(-1, (groups, m)))


def until(chosen: UniversalSet | None, before: int) -> UniversalSet | None:
    """The keys of a set that lie before a position."""
    if chosen is None:
        return None
    valid = chosen.valid & (chosen.index < before)
    return replace(chosen, index=chosen.index * valid, valid=valid, scores=chosen.scores * valid)


def join(parts: list[Part]) -> Part:
    """Parts of successive queries as one."""
    if len(parts) == 1:
        return parts[0]
    return Part(torch.cat([part.out for part in parts], -2), torch.cat([part.lse for part in parts], -1))
