"""The folder of a training run: recipe, metrics as JSON lines, and the checkpoint from which it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from levattention.sources import leftovers, replacing
from levattention.statefile import load_state, save_state

RECIPE, METRICS, STATE, WEIGHTS = "recipe.json", "metrics.jsonl", "state.safetensors", "model.safetensors"
FILES = (STATE, METRICS, WEIGHTS, RECIPE)
KIND = "training run"
MOMENTS = ("exp_avg", "exp_avg_sq")


class RunFolder:
    """What a run keeps on disk.

    Args:
        path: the folder; made where it is missing, emptied of an earlier run unless that is to go on.
        about: what defines the run, as JSON has it. A checkpoint of another one is refused.
        resume: go on with what is there.
        writes: whether this process is the one that writes; the others look only.

    Raises:
        ValueError: a folder that holds something else, or a run that was defined otherwise.
    """

    def __init__(self, path: str | Path, about: dict[str, Any], *, resume: bool, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: expected a folder for the run, got a file")
        torn = [path for name in FILES for path in leftovers(self.path / name)]
        others = set(self.path.iterdir()) - set(torn) if self.path.is_dir() else set()
        if others and not (self.path / RECIPE).is_file():
            raise ValueError(f"{self.path}: expected an empty folder or one of an earlier run, got other files")
        for path in torn if writes else ():
            path.unlink(missing_ok=True)
        # Without a checkpoint there is nothing to go on from. Who only looks finds one if the writer left it.
        self.resumes = (resume or not writes) and (self.path / STATE).is_file()
        if self.resumes:
            _require_same(self.path / RECIPE, json.loads((self.path / RECIPE).read_text()), about)
        if self.resumes or not writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        with replacing(self.path / RECIPE) as temporary:
            temporary.write_text(json.dumps(about, indent=1))

    def write(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        if not self.writes:
            return
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, seconds: float) -> None:
        """Replace the checkpoint: weights, AdamW's moments, how many steps are done, and the time they took."""
        if not self.writes:
            return
        held = {f"model.{name}": value for name, value in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            for moment in MOMENTS if parameter in optimizer.state else ():
                held[f"{moment}.{name}"] = optimizer.state[parameter][moment]
        held = {name: value.detach().cpu() for name, value in held.items()}
        save_state(self.path / STATE, KIND, held, {"step": step, "seconds": seconds})

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        """(steps done, seconds) of the checkpoint, whose weights and moments go into model and optimizer.

        Metrics written after the checkpoint are cut off: those steps are taken again.
        """
        if not self.resumes:
            return 0, 0.0
        held, config = load_state(self.path / STATE, KIND)
        step, seconds = config["step"], config["seconds"]
        model.load_state_dict({name[6:]: value for name, value in held.items() if name.startswith("model.")})
        for name, parameter in model.named_parameters():
            if f"{MOMENTS[0]}.{name}" in held:
                moments = {moment: held[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
                # A fused optimizer counts its steps beside the parameters, any other one on the CPU.
                place = parameter.device if optimizer.defaults.get("fused") else None
                optimizer.state[parameter] = {"step": torch.tensor(float(step), device=place), **moments}
        if self.writes:
            self._cut(step)
        return step, seconds

    def _cut(self, step: int) -> None:
        path = self.path / METRICS
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        # A line that was being written when the run was killed has no end.
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        with replacing(path) as temporary:
            temporary.write_text("".join(kept))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics of a run's folder."""
    return [json.loads(line) for line in (Path(path) / METRICS).read_text().splitlines()]


def _require_same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    was, is_ = _flat(before), _flat(now)
    if other := sorted(name for name in was.keys() | is_.keys() if was.get(name) != is_.get(name)):
        shown = ", ".join(f"{name} {was.get(name)!r} then and {is_.get(name)!r} now" for name in other[:3])
        raise ValueError(f"{path}: expected the run that is to be resumed to be this one, got {shown}")


def _flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(nested, dict):
        return {prefix.rstrip("."): nested}
    return {name: value for key, part in nested.items() for name, value in _flat(part, f"{prefix}{key}.").items()}
