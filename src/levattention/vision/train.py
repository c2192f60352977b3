"""Training a vision transformer by a `Recipe`: full attention first, then universal keys; resumed where it was killed.

Every random number depends on the seed and the step, so a checkpoint is weights, moments and a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from levattention.vision.evaluate import rank, wilson
from levattention.vision.feed import Feed
from levattention.vision.images import ImageSet
from levattention.vision.models import save_vit
from levattention.vision.overlap import overlap
from levattention.vision.recipe import Recipe
from levattention.vision.runfolder import WEIGHTS, RunFolder
from levattention.vision.selection import Selection, apply_selection

__all__ = ["train"]

# Images at a time where no gradients are kept.
TEST_BATCH = 100


def train(
    recipe: Recipe,
    training: ImageSet,
    test: ImageSet,
    out: str | Path,
    *,
    resume: bool = False,
    cpu: bool = False,
    workers: int = 0,
    tell: Callable[[dict[str, Any]], Any] = lambda line: None,
) -> dict[str, Any]:
    """Train by a recipe; the last line of the metrics.

    Writes to `out`: recipe.json; metrics.jsonl, a line of loss every `log_every` steps and one of test accuracy and
    overlap every epoch; state.safetensors, from which to resume; and the model, model.safetensors.
    Started by `accelerate launch` it runs on many devices, each with its share of every batch.

    Args:
        recipe: what to do.
        training: images to learn from.
        test: images to test on.
        out: a folder. An earlier run in it is replaced, or gone on with.
        resume: go on from the checkpoint in `out`, if there is one.
        cpu: stay off the GPU.
        workers: processes that read image files.
        tell: called with every line of the metrics, and the number of steps as "steps".

    Raises:
        ValueError: images that the recipe's model does not take, or a checkpoint of another run.
    """
    training = training.require_classes(recipe.shape.classes)
    test = test.require_classes(recipe.shape.classes, training.classes)
    trainer = Trainer(recipe, len(training), cpu)
    main = trainer.accelerator.is_main_process
    about = {"recipe": recipe.as_dict(), "data": training.name, "images": len(training), "steps": trainer.steps}
    # The first process makes the folder before the others look into it.
    with trainer.accelerator.main_process_first():
        folder = RunFolder(out, about, resume=resume, writes=main)
    first, spent = folder.load(trainer.model, trainer.optimizer)
    trainer.prepare()
    began = seen = time.perf_counter()
    logged, line = first, {"step": first}

    def write(new: dict[str, Any]) -> dict[str, Any]:
        folder.write(new)
        if main:
            tell(new | {"steps": trainer.steps})
        return new

    for step, (images, labels, generator) in enumerate(trainer.feed(training, workers)(first, trainer.steps), first):
        loss = trainer.step(step, images, labels, generator)
        done = step + 1
        shown = done % recipe.log_every == 0 or done == trainer.steps
        tested = trainer.tested(done)
        saved = tested or done % recipe.save_every == 0
        # A run that has come apart must not replace a good checkpoint.
        if shown or saved:
            value, now = trainer.mean(loss), time.perf_counter()
            if not math.isfinite(value):
                raise ValueError(f"lr: the loss is {value} at step {done}: expected one that a lower lr keeps finite")
        if shown:
            rate = (done - logged) * recipe.batch / (now - seen)
            seen, logged = now, done
            line = write({**trainer.place(done), "loss": value, "images_per_second": round(rate, 1)})
        if tested:
            line = write({**trainer.place(done), **trainer.test(test), "seconds": round(spent + now - began, 1)})
            seen, logged = time.perf_counter(), done
        if main and saved:
            seconds = spent + time.perf_counter() - began
            facts = {"step": done, "steps": trainer.steps, "seconds": round(seconds, 1), "data": training.name}
            facts |= {name: line[name] for name in ("top1", "top1_interval") if tested}
            trainer.export(folder.path / WEIGHTS, training, facts)
            folder.save(trainer.model, trainer.optimizer, done, seconds)
    return line


class Trainer:
    """A model, its optimizer and their devices, one step at a time.

    Args:
        recipe: what to do.
        images: how many there are to learn from.
        cpu: stay off the GPU.
    """

    def __init__(self, recipe: Recipe, images: int, cpu: bool = False) -> None:
        from accelerate import Accelerator

        self.recipe = recipe
        self.images, self.epoch = images, images / recipe.batch
        self.steps = recipe.steps(images)
        # Autocast is our own: accelerate's is set once for a process, whatever runs in it later.
        self.accelerator = Accelerator(mixed_precision="no", cpu=cpu)
        self.model = recipe.shape.build(recipe.seed).to(self.accelerator.device)
        # One kernel for all parameters on CUDA; elsewhere PyTorch's default, whose bits a resumed run repeats.
        fused = True if self.accelerator.device.type == "cuda" else None
        self.optimizer: Any = torch.optim.AdamW(
            _groups(self.model, recipe), lr=recipe.lr, betas=recipe.betas, fused=fused
        )
        self._forward: Any = None
        self._selection: Selection | None = None

    def prepare(self) -> None:
        """Wrap the model for its devices; after its weights are what they shall be."""
        self.wrapped = self.accelerator.prepare(self.model)
        self._attend_by(None)

    def feed(self, training: ImageSet, workers: int) -> Feed:
        """This process's part of the batches."""
        share = (self.accelerator.process_index, self.accelerator.num_processes)
        recipe, device = self.recipe, self.accelerator.device
        return Feed(
            training, recipe.preprocess, recipe.augment, recipe.batch, recipe.seed, device, share=share, workers=workers
        )

    def step(self, step: int, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """One step, counted from 0, on uint8 images (B, c, h, w); the loss before it, still on the device."""
        recipe = self.recipe
        wanted = self.selection(step)
        if wanted != self._selection:
            self._attend_by(wanted)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step, self.steps)
        self.model.train()
        pixels, targets = recipe.augment.mixed(recipe.preprocess(images), labels, recipe.shape.classes, generator)
        parts = range(0, len(pixels), recipe.micro_batch or len(pixels))
        total = torch.zeros((), device=pixels.device)
        for start in parts:
            stop = start + parts.step
            # Gradients are summed over devices once, with the last part.
            quiet = self.accelerator.no_sync(self.wrapped) if stop < len(pixels) else nullcontext()
            with quiet:
                with torch.autocast(pixels.device.type, torch.bfloat16, enabled=recipe.bf16):
                    logits = self._forward(pixel_values=pixels[start:stop]).logits.float()
                loss = cross_entropy(logits, targets[start:stop], reduction="sum") / len(pixels)
                self.accelerator.backward(loss)
            total += loss.detach()
        if recipe.clip:
            self.accelerator.clip_grad_norm_(self.wrapped.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def selection(self, step: int) -> Selection | None:
        """The selection that a step uses; None for full attention."""
        return None if step < self.recipe.warm_steps(self.steps) else self.recipe.selection

    def mean(self, loss: Tensor) -> float:
        """Over all processes."""
        return float(self.accelerator.reduce(loss, "mean"))

    def place(self, done: int) -> dict[str, Any]:
        """Where the run stands after so many steps."""
        used = self.selection(done - 1)
        return {
            "step": done,
            "epoch": round(done / self.epoch, 4),
            "lr": self.recipe.learning_rate(done - 1, self.steps),
            "attention": "full" if used is None else used.describe(),
        }

    def tested(self, done: int) -> bool:
        """Whether so many steps end an epoch, or the stretch between two tests, or the run."""
        if done == self.steps:
            return True
        if self.recipe.test_every:
            return done % self.recipe.test_every == 0
        batch = self.recipe.batch
        return done * batch // self.images > (done - 1) * batch // self.images

    def test(self, images: ImageSet) -> dict[str, Any]:
        """Accuracy on the images with the attention in use, and the overlap of U with the important keys."""
        self.model.eval()
        recipe, device = self.recipe, self.accelerator.device
        ranked, labels, _ = rank(self.model, images, recipe.preprocess, TEST_BATCH)
        right = ranked == labels.unsqueeze(-1)
        count, of = int(right[:, 0].sum()), len(labels)
        found: dict[str, Any] = {"top1": count / of, "top1_interval": list(wilson(count, of))}
        found["top5"] = float(right.any(-1).double().mean())
        if recipe.overlap_images:
            shown, _ = recipe.preprocess.collate([images[i] for i in range(min(of, recipe.overlap_images))])
            shares = overlap(self.model, recipe.preprocess(shown).to(device), recipe.selection)
            found["overlap"] = [[round(share, 4) for share in heads] for heads in shares.tolist()]
        return found

    def export(self, path: Path, training: ImageSet, facts: dict[str, Any]) -> None:
        """Write the model, with the attention in use."""
        save_vit(
            path,
            self.model,
            self.recipe.preprocess,
            selection=self._selection,
            classes=training.classes,
            recipe=self.recipe.as_dict(),
            **facts,
        )

    def _attend_by(self, selection: Selection | None) -> None:
        apply_selection(self.model, selection)
        self._selection, self._forward = selection, self.wrapped
        if self.recipe.compile:
            torch.compiler.reset()
            self._forward = torch.compile(self.wrapped, mode=self.recipe.compile)


def _groups(model: Any, recipe: Recipe) -> list[dict[str, Any]]:
    """Parameters with and without decay: matrices shrink; biases, norms, positions and the class token do not."""
    learned = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    decayed = [value for name, value in learned if name.endswith("weight") and value.ndim > 1]
    others = [value for name, value in learned if not (name.endswith("weight") and value.ndim > 1)]
    return [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
