"""A training run as a value: the model's shape, the schedule, the augmentation and the selection of keys."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from levattention.vision.augment import Augment
from levattention.vision.preprocess import Preprocess
from levattention.vision.selection import Selection
from levattention.vision.shape import Shape


@dataclass(frozen=True)
class Recipe:
    """One row of a table of trained models.

    Attributes:
        shape: the model.
        mean: of each channel of the images, in [0, 1].
        std: of each channel.
        epochs: passes over the training images; need not be whole.
        batch: images a step, over all devices.
        lr: AdamW's highest learning rate, reached after the warm-up, then along a half cosine to zero.
        weight_decay: AdamW's, of weight matrices alone: a step takes lr · weight_decay of a weight away.
        warmup: steps.
        selection: how heads choose their keys; None for full attention.
        warm_start: share of the steps, the first ones, with full attention.
        augment: what is done to a training image.
        crop: see `Preprocess`, for the test images.
        betas: AdamW's.
        clip: largest norm of the gradient; 0 for any.
        seed: of the weights, the order of the images and every augmentation.
        bf16: compute in bfloat16 (autocast); the weights stay fp32.
        compile: "" for none, or a mode of torch.compile ("default", "max-autotune", ...).
        micro_batch: images at a time on a device, where the batch is too large for it; 0 for all.
        test_every: steps between evaluations; 0 for the end of each epoch.
        save_every: steps between checkpoints.
        log_every: steps between lines of loss.
        overlap_images: test images on which U is compared with the important keys.
    """

    shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    epochs: float
    batch: int
    lr: float
    weight_decay: float
    warmup: int
    selection: Selection | None = None
    warm_start: float = 0.0
    augment: Augment = field(default_factory=Augment)
    crop: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    seed: int = 0
    bf16: bool = False
    compile: str = ""
    micro_batch: int = 0
    test_every: int = 0
    save_every: int = 500
    log_every: int = 10
    overlap_images: int = 16

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "lr", "save_every", "log_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
        for name in ("weight_decay", "warmup", "clip", "micro_batch", "test_every", "overlap_images"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: expected zero or a positive number, got {getattr(self, name)}")
        if not 0 <= self.warm_start < 1:
            raise ValueError(f"warm_start: expected a share of the steps in [0, 1), got {self.warm_start}")

    @property
    def preprocess(self) -> Preprocess:
        """What test images go through."""
        return Preprocess(self.mean, self.std, self.shape.image, self.shape.channels, self.crop)

    def steps(self, images: int) -> int:
        """Of the whole run, for so many training images."""
        return max(1, round(self.epochs * images / self.batch))

    def warm_steps(self, steps: int) -> int:
        """How many of them are taken with full attention."""
        return steps if self.selection is None else round(self.warm_start * steps)

    def learning_rate(self, step: int, steps: int) -> float:
        """Of a step, counted from 0: up in a straight line, down along a half cosine."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, steps - self.warmup)))

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        # Through JSON, so that it equals what is read back: tuples as lists.
        return json.loads(json.dumps(asdict(self)))


def load_recipe(reference: str, changes: Mapping[str, str] | None = None) -> Recipe:
    """The recipe that `FILE.py:function` names, with single values changed.

    Args:
        reference: a Python file and a function in it that takes nothing and gives a `Recipe`.
        changes: new values by name, as text; `shape.hidden`, `augment.mixup`, `selection.top_k` reach inside.

    Raises:
        ValueError: no such file, function or name, or a value that does not fit.
    """
    file, _, name = reference.partition(":")
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"{file}: expected a recipe as FILE.py:function, and there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises
        raise ValueError(f"{file}: cannot be run ({type(error).__name__}: {error})") from error
    known = {key: made for key, made in vars(module).items() if _makes_recipe(key, made)}
    if name not in known:
        raise ValueError(f"{reference}: expected one of {', '.join(f'{file}:{key}' for key in sorted(known))}")
    recipe = known[name]()
    for key, text in (changes or {}).items():
        recipe = _changed(recipe, key.split("."), key, text)
    return recipe


def _makes_recipe(name: str, made: Any) -> bool:
    """Whether it is a public function that takes nothing and says that it gives a recipe."""
    if name.startswith("_") or not inspect.isfunction(made) or inspect.signature(made).parameters:
        return False
    given = made.__annotations__.get("return")
    return given is Recipe or given == "Recipe"


def _changed(value: Any, path: list[str], key: str, text: str) -> Any:
    """The dataclass with one field, perhaps of a field, read from text."""
    kinds = typing.get_type_hints(type(value))
    name = path[0]
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or name not in kinds:
        raise ValueError(f"{key}: there is nothing of this name to set; there is {', '.join(sorted(kinds))}")
    if len(path) > 1:
        return replace(value, **{name: _changed(getattr(value, name), path[1:], key, text)})
    readers: dict[Any, Callable[[str], Any]] = {int: int, float: float, str: str, bool: _boolean}
    if kinds[name] not in readers:
        raise ValueError(f"{key}: expected a number, a word, true or false to be set; {key} is more than that")
    try:
        return replace(value, **{name: readers[kinds[name]](text)})
    except ValueError as error:
        raise ValueError(f"{key}={text}: {error}") from None


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("expected true or false")
    return text.lower() == "true"
