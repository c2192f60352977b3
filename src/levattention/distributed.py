"""The universal set of keys that many processes hold, over a torch.distributed process group (gloo, nccl).

Every rank sends what it has added up to the first rank, which merges in the order of the ranks and answers. So the
order of every sum is fixed, all ranks are given the same bits, and a rank that is gone fails its own message alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor

from levattention.checks import require_eps
from levattention.folds import A, Hits, State
from levattention.losses import Loss, Power, to_config
from levattention.passes import found_by, judged_by
from levattention.stream import KeyStream
from levattention.universal import UniversalSet

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from levattention.wire import Traffic, Wire

Protocol = Literal["one-round", "two-round"]

# Rows that are read at a time where a round adds up more than a stream's state.
BLOCK = 4096


@dataclass(frozen=True)
class ShardedSet(UniversalSet):
    """A universal set whose keys lie elsewhere, hence with its keys.

    Attributes:
        keys: the keys of the set, (*batch, c, d), in its order; zero rows in slots that are not valid.
        traffic: what finding it sent.
    """

    keys: Tensor | None = None
    traffic: Traffic | None = None


def universal_set(
    local_keys: Tensor,
    *,
    eps: float,
    loss: Loss = Power(2),  # noqa: B008 (frozen)
    group: dist.ProcessGroup | DeviceMesh | None = None,
    protocol: Protocol | None = None,
    timeout: float | None = None,
) -> ShardedSet:
    """The universal set of the rows of all ranks, the same bits on every rank; every rank must call it.

    Positions are global: the rows of rank 0 come first, then those of rank 1, and so on. The set does not depend on how
    many ranks there are or how the rows are cut, shards may be uneven or empty.

    Protocols. "one-round": a rank sends its Gram and the rows that can still matter, d² + |candidates|·d numbers, where
    |candidates| ≤ rank/ε. "two-round", as in the paper: Grams go up and their sum comes down, 2d² numbers, then each
    rank sends those of its rows that are in U, |Uᵢ|·d. Ill-conditioned keys send R instead of the Gram. The default is
    one round for x² and even p (which sends the lift's Gram). For other losses the default repeats the first round for
    each step of their weights, because weights fixed in one round depend on how the rows are cut: asked for "one-round"
    or "two-round", these losses give a certified superset that does.

    Args:
        local_keys: this rank's rows (m, d); (*batch, m, d) in one round.
        eps: threshold in (0, 1].
        loss: f.
        group: a process group or a mesh with one dimension; by default everybody.
        protocol: see above.
        timeout: seconds any one message may take; by default the group's own.

    Raises:
        ValueError: bad keys or arguments on any rank, named; no rows at all. Every rank raises.
        ConnectionError: a rank is gone, or did not answer in time.
    """
    from levattention.wire import Wire, resolve_group

    eps, local_keys = require_eps(eps), local_keys.detach()
    if protocol not in (None, "one-round", "two-round"):
        raise ValueError(f"protocol: expected 'one-round', 'two-round' or None, got {protocol!r}")
    summed = isinstance(loss, Power) and loss.even
    if protocol is None and summed:
        protocol = "one-round"
    wire = Wire(resolve_group(group), timeout)
    ask = {"eps": eps, "loss": to_config(loss), "protocol": protocol or "repeated rounds"}
    if protocol == "one-round":
        return _one_round(wire, local_keys, eps, loss, ask)

    def fold(make: Callable[[], A]) -> A:
        seen = make()

        def mine() -> State:
            for block in local_keys.split(BLOCK) if local_keys.ndim == 2 else [local_keys]:
                seen.update(block)
            return seen.state()

        def take(state: State) -> None:
            other = make()
            other.restore(*_on(local_keys, state))
            seen.merge(other)

        answer = make()
        turn = Turn(mine, take, seen.state, final=isinstance(seen, Hits))
        answer.restore(*_on(local_keys, _meet(wire, ask, turn)))
        return answer

    judge = judged_by(fold, loss, eps, online=protocol == "two-round")
    found, hits = found_by(fold, judge, eps, keep_rows=True)
    return _with_keys(found, hits.kept(found), wire)


def _one_round(wire: Wire, local_keys: Tensor, eps: float, loss: Loss, ask: dict[str, Any]) -> ShardedSet:
    """Every rank sends its stream's state; the first merges them and sends the set."""
    shaped = local_keys.ndim >= 2 and local_keys.shape[-1] > 0
    *batch, _, d = local_keys.shape if shaped else (0, 1)
    stream = KeyStream(d, eps=eps, loss=loss, batch=tuple(batch), device=local_keys.device)

    def mine() -> State:
        # Not before: the other ranks wait to be told.
        if not shaped:
            raise ValueError(f"local_keys: expected shape (*batch, m, d), got {tuple(local_keys.shape)}")
        stream.update(local_keys)
        return stream.state()

    def answer() -> State:
        found = stream.finish()
        tensors = {f.name: getattr(found, f.name) for f in fields(found)}
        kept = stream.candidates.at(found.index.reshape(-1, found.index.shape[-1]))
        rows = kept.reshape(*found.index.shape, d) * found.valid.unsqueeze(-1)
        return {n: t for n, t in tensors.items() if isinstance(t, Tensor)} | {"rows": rows}, {"route": found.route}

    def take(state: State) -> None:
        stream.merge(KeyStream.of_state(*_on(local_keys, state), local_keys.device))

    turn = Turn(mine, take, answer, final=True)
    tensors, config = _on(local_keys, _meet(wire, ask, turn))
    rows = tensors.pop("rows")
    return _with_keys(UniversalSet(**tensors, route=config["route"]), rows, wire)


@dataclass(frozen=True)
class Turn:
    """One round as each rank sees it.

    Attributes:
        mine: look at the local rows, and what goes to the first rank.
        take: on the first rank, merge the state of the next rank.
        answer: on the first rank, what goes to all.
        final: whether the answer is the result.
    """

    mine: Callable[[], State]
    take: Callable[[State], None]
    answer: Callable[[], State]
    final: bool


def _meet(wire: Wire, ask: dict[str, Any], turn: Turn) -> State:
    """States go to the first rank, its answer comes back. A failure anywhere becomes everybody's.

    Raises:
        ValueError: bad input on some rank.
        ConnectionError: a rank is gone.
        RuntimeError: anything else that went wrong on some rank.
    """
    from levattention.wire import words

    mine, failure = _try(turn.mine, _NOTHING)
    wire.traffic.rounds += 1
    wire.traffic.words += words(mine)
    if wire.rank:
        wire.send(0, _labelled(mine, wire.rank, ask, failure))
        tensors, config = wire.receive(0)
        if failure is not None:
            raise failure
        if config["failed"]:
            raise _failure(config)
        answer: State = tensors, config["state"]
    else:
        failure = _merge_at_first(wire, ask, turn, failure)
        answer, failed = _try(turn.answer, _NOTHING) if failure is None else (_NOTHING, failure)
        for rank in range(1, wire.size):
            lost = _send(wire, rank, _labelled(answer, 0, ask, failed))
            failed = failed or lost
        if failed is not None:
            raise failed
    if turn.final:
        wire.traffic.delivered += words(answer)
    else:
        wire.traffic.words += words(answer)
    return answer


def _merge_at_first(wire: Wire, ask: dict[str, Any], turn: Turn, failure: Exception | None) -> Exception | None:
    """Merge the states as they come, in the order of the ranks; what went wrong on the first rank where it did."""
    for rank in range(1, wire.size):
        try:
            tensors, config = wire.receive(rank)
        except ConnectionError as error:
            return failure or error
        if failure is not None:
            continue
        if config["failed"]:
            failure = _failure(config)
        elif config["ask"] != ask:
            failure = ValueError(
                f"expected the same eps, loss and protocol on every rank, got {ask} on rank 0 "
                f"and {config['ask']} on rank {rank}"
            )
        else:
            _, failure = _try(partial(turn.take, (tensors, config["state"])), None)
    return failure


T = TypeVar("T")
_NOTHING: State = ({}, {})


def _try(work: Callable[[], T], otherwise: T) -> tuple[T, Exception | None]:
    """What the work gives, or what it raised: every rank waits for the others, whatever went wrong."""
    try:
        return work(), None
    except Exception as error:
        return otherwise, error


def _send(wire: Wire, rank: int, state: State) -> ConnectionError | None:
    """Nothing, or that the rank is gone."""
    try:
        wire.send(rank, state)
    except ConnectionError as error:
        return error
    return None


_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "ConnectionError": ConnectionError}


def _labelled(state: State, rank: int, ask: dict[str, Any], failure: Exception | None) -> State:
    """A state with what was asked for, and with what went wrong instead."""
    tensors, config = state
    label = {"ask": ask, "state": config, "failed": "", "kind": ""}
    if failure is not None:
        known = str(failure)
        label |= {"failed": known if known.startswith("rank ") else f"rank {rank}: {known}"}
        label |= {"kind": type(failure).__name__}
    return tensors, label


def _failure(config: dict[str, Any]) -> Exception:
    """What went wrong elsewhere."""
    return _KINDS.get(config["kind"], RuntimeError)(config["failed"])


def _on(local_keys: Tensor, state: State) -> State:
    """The state on this rank's device."""
    tensors, config = state
    return {name: tensor.to(local_keys.device) for name, tensor in tensors.items()}, config


def _with_keys(found: UniversalSet, rows: Tensor, wire: Wire) -> ShardedSet:
    return ShardedSet(**{f.name: getattr(found, f.name) for f in fields(found)}, keys=rows, traffic=wire.traffic)
