"""Ranks for the tests: one process that imports torch once and forks them all, before anything has been computed.

python ranks.py FOLDER. Each rank leaves what it found in FOLDER/SCENARIO/RANK.pt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import levattention as la
from levattention.losses import Huber, Power, Tukey

sys.path.insert(0, str(Path(__file__).parents[1]))

from strategies import conditioned, deficient, heavy_tailed, spikes

EPS = 0.05
LOSSES = {"x2": Power(2), "x4": Power(4), "x1": Power(1), "x3": Power(3), "Huber": Huber(), "Tukey": Tukey()}


def keys():
    growing = heavy_tailed(600, 5, 1) * torch.logspace(-6, 6, 600, dtype=torch.float64).unsqueeze(-1)
    return {
        "heavy tails": heavy_tailed(600, 5),
        "fp32": heavy_tailed(600, 5, 2).float(),
        "bf16 of rank 3": deficient(600, 5, 3).bfloat16(),
        "growing": growing,
        "kappa 1e7": conditioned(600, 5, 1e7),
        "spikes": spikes(600, 5),
        "zeros and duplicates": (heavy_tailed(60, 5, 3).repeat(10, 1) * (torch.arange(600) % 3 == 0).unsqueeze(-1)),
    }


# Uneven; with four ranks one is empty and one has fewer rows than columns.
CUTS = {1: [0, 600], 2: [0, 170, 600], 4: [0, 3, 3, 400, 600]}


def shard(matrix, rank, size):
    return matrix[CUTS[size][rank] : CUTS[size][rank + 1]]


def found(u):
    names = ("index", "valid", "scores", "eps", "keys", "rank")
    return {name: getattr(u, name) for name in names} | {"route": u.route, "traffic": vars(u.traffic)}


def equal(rank, size):
    """Every loss and protocol, in groups of 1, 2 and 4, and over a mesh; bytes are counted where they leave."""
    sent = []
    real = dist.isend
    dist.isend = lambda tensor, **options: (
        sent.append(tensor.numel() * tensor.element_size()),
        real(tensor, **options),
    )[1]
    groups = {count: dist.new_group(list(range(count))) for count in (1, 2, 4)}
    results = {}
    for count, group in groups.items():
        if rank >= count:
            continue
        for name, matrix in keys().items():
            mine = shard(matrix, rank, count)
            for loss in LOSSES if name in ("heavy tails", "growing") else ["x2", "x4"]:
                for protocol in (None, "one-round", "two-round"):
                    sent.clear()
                    u = la.distributed.universal_set(
                        mine, eps=EPS, loss=LOSSES[loss], group=group, protocol=protocol, timeout=60
                    )
                    results[count, name, loss, protocol] = found(u) | {"sent": sum(sent)}
    mesh = init_device_mesh("cpu", (size,))
    results["mesh"] = found(la.distributed.universal_set(shard(keys()["fp32"], rank, size), eps=EPS, group=mesh))
    heads = heavy_tailed(600, 6, 4).reshape(600, 2, 3).transpose(0, 1)
    cuts = CUTS[size]
    results["heads"] = found(la.distributed.universal_set(heads[:, cuts[rank] : cuts[rank + 1]], eps=EPS))
    return results


def errors(rank, size):
    """What every rank is told when one is given something bad. The group goes on working afterwards."""
    good = heavy_tailed(300, 5, rank)
    holed = good.clone()
    holed[7, 2] = torch.nan
    cases = {
        "nan": (holed if rank == 1 else good, {}),
        "nan at the first": (holed if rank == 0 else good, {"protocol": "two-round"}),
        "width": (good[:, :4] if rank == 1 else good, {}),
        "width, two rounds": (good[:, :4] if rank == 1 else good, {"protocol": "two-round"}),
        "flat": (good[0] if rank == 1 else good, {}),
        "eps": (good, {"eps": 0.1 if rank == 1 else EPS}),
        "protocol": (good, {"protocol": "two-round" if rank == 1 else "one-round"}),
        "empty": (good[:0], {}),
        "empty, two rounds": (good[:0], {"protocol": "two-round"}),
        "no such protocol": (good, {"protocol": "three"}),
    }
    results = {}
    for name, (mine, options) in cases.items():
        try:
            la.distributed.universal_set(mine, **({"eps": EPS} | options))
            results[name] = "nothing"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    mesh = init_device_mesh("cpu", (1, size))
    try:
        la.distributed.universal_set(good, eps=EPS, group=mesh)
    except ValueError as error:
        results["mesh"] = str(error)
    results["after"] = found(la.distributed.universal_set(good, eps=EPS))
    return results


def lost(rank, size, how, who):
    """What the others are told when a rank is killed, or hangs, in the middle."""
    started = time.monotonic()
    if rank == who:
        os.kill(os.getpid(), how)
    try:
        la.distributed.universal_set(heavy_tailed(300, 5, rank), eps=EPS, timeout=2)
        told = "nothing"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return {"told": told, "seconds": time.monotonic() - started}


SCENARIOS = {
    "equal": (4, equal),
    "errors": (2, errors),
    "killed": (3, lambda rank, size: lost(rank, size, signal.SIGKILL, 2)),
    "first killed": (3, lambda rank, size: lost(rank, size, signal.SIGKILL, 0)),
    "hung": (3, lambda rank, size: lost(rank, size, signal.SIGSTOP, 1)),
}


def main():
    torch.set_num_threads(1)
    children = {}
    for scenario, (size, work) in SCENARIOS.items():
        folder = Path(sys.argv[1]) / scenario
        folder.mkdir()
        for rank in range(size):
            child = os.fork()
            if child == 0:
                dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
                torch.save(work(rank, size), folder / f"{rank}.pt")
                # No farewell to the others: some of them may be gone.
                os._exit(0)
            children[child] = scenario
    waiting, deadline = set(children), time.monotonic() + 150
    while waiting and time.monotonic() < deadline:
        done, _ = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        waiting.discard(done)
        time.sleep(0.02)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    sys.exit(f"never ended: {[children[child] for child in waiting]}" if waiting else 0)


if __name__ == "__main__":
    main()
