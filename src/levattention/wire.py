"""Messages between the ranks of a process group and its first rank, counted, and with an end to every wait."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from levattention.folds import State

# What a protocol is charged for: matrices and keys. Positions, flags and counts are bytes besides.
PAYLOAD = frozenset({"gram", "upper", "map", "rows"})


@dataclass
class Traffic:
    """What one rank exchanged with the first one. The first rank is charged for its own share as if it were sent.

    Attributes:
        rounds: how often every rank sent something.
        words: numbers in the matrices and keys that went up, and in the matrices that came down.
        delivered: numbers in the keys of the result, which every rank is given in the end.
        bytes: all that this rank sent and received, with positions, flags and headers.
    """

    rounds: int = 0
    words: int = 0
    delivered: int = 0
    bytes: int = 0


class Wire:
    """Point-to-point messages: a rank that is gone fails its own message and nobody else's."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        self.traffic = Traffic()
        on_gpu = "nccl" in str(dist.get_backend(group))
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def send(self, rank: int, state: State) -> None:
        """Send a state to one rank.

        Raises:
            ConnectionError: it did not take it in time, or is gone.
        """
        body = encode(state).to(self.device)
        with self._answering(rank):
            for part in (torch.tensor([len(body)], device=self.device), body):
                self._wait(dist.isend(part, group=self.group, group_dst=rank))
        self.traffic.bytes += len(body) + 8

    def receive(self, rank: int) -> State:
        """A state from one rank.

        Raises:
            ConnectionError: it did not send in time, or is gone.
        """
        with self._answering(rank):
            length = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._wait(dist.irecv(length, group=self.group, group_src=rank))
            body = torch.empty(int(length), dtype=torch.uint8, device=self.device)
            self._wait(dist.irecv(body, group=self.group, group_src=rank))
        self.traffic.bytes += len(body) + 8
        return decode(body)

    def _wait(self, work: Any) -> None:
        work.wait() if self.timeout is None else work.wait(self.timeout)

    @contextmanager
    def _answering(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1].split(". ")[0]
            raise ConnectionError(f"rank {rank} of {self.size} is gone or did not answer in time ({reason})") from error


def encode(state: State) -> Tensor:
    """A state as bytes. Where R travels the Gram stays at home: it is RᵀR."""
    from safetensors.torch import save

    tensors, config = state
    triangles = {name.removesuffix("upper") for name in tensors if name.endswith("upper")}
    sent = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if not _implied(name, triangles)}
    sent["config"] = torch.frombuffer(bytearray(json.dumps(config).encode()), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(sent)), dtype=torch.uint8)


def decode(body: Tensor) -> State:
    """The state that `encode` was given, on the CPU."""
    from safetensors.torch import load

    # Copied, as from a file: see `load_state`.
    tensors = {name: tensor.clone() for name, tensor in load(body.cpu().numpy().tobytes()).items()}
    config = json.loads(bytes(tensors.pop("config").tolist()))
    return tensors, config


def words(state: State) -> int:
    """Numbers in the matrices and keys of a state that is sent."""
    tensors, _ = state
    triangles = {name.removesuffix("upper") for name in tensors if name.endswith("upper")}
    charged = (t for name, t in tensors.items() if name.split(".")[-1] in PAYLOAD and not _implied(name, triangles))
    return sum(t.numel() for t in charged)


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group of a group, of a mesh with one dimension, or of everybody.

    Raises:
        ValueError: no process group was made, a mesh with more dimensions, or this process is not a member.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "group: expected an initialised process group; call torch.distributed.init_process_group, or use torchrun"
        )
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a mesh with one dimension, got {group}; slice it by a dimension's name")
        return group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError("group: expected a group that this process is a member of")
    return group


def _implied(name: str, triangles: set[str]) -> bool:
    return name.endswith("gram") and name.removesuffix("gram") in triangles
