"""Vision transformers from wherever they are: `load_vit(source)`; and `save_vit`, our own checkpoints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from levattention.sources import replacing
from levattention.vision.data import IMAGENET_MEAN, IMAGENET_STD
from levattention.vision.preprocess import Preprocess
from levattention.vision.selection import Selection, apply_selection
from levattention.vision.shape import empty_vit

# The entry of a safetensors file's metadata that holds everything beside the weights.
METADATA = "levattention"
WEIGHTS = "model.safetensors"

# timm's name -> transformers' name, for what is not attention's qkv.
_RENAMED = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def vit_from_timm(source: str | Path | Mapping[str, Tensor], *, num_heads: int | None = None) -> Any:
    """transformers' `ViTForImageClassification` with the weights of a timm vision transformer, in fp32, for inference.

    Args:
        source: a state dict with timm's names, or the path of a safetensors file that holds one.
        num_heads: by default heads of width 64, as in every ViT-Ti, S, B and L.

    Raises:
        ValueError: a state dict of another architecture, naming what is missing or left over.
    """
    from transformers import ViTConfig, ViTForImageClassification

    weights = dict(source) if isinstance(source, Mapping) else _weights(Path(source))
    needed = {"cls_token", "pos_embed", "patch_embed.proj.weight", "head.weight", "blocks.0.mlp.fc1.weight"}
    if missing := sorted(needed - set(weights)):
        raise ValueError(f"source: expected a timm ViT with a class token and a linear head, got one without {missing}")
    patch = weights["patch_embed.proj.weight"]
    dim, tokens = patch.shape[0], weights["pos_embed"].shape[1]
    side = math.isqrt(tokens - 1)
    if side * side != tokens - 1:
        raise ValueError(
            f"source: expected position embeddings of a class token and a square grid, got {tokens} tokens"
        )
    config = ViTConfig(
        hidden_size=dim,
        num_hidden_layers=1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks.")),
        num_attention_heads=max(1, dim // 64) if num_heads is None else num_heads,
        intermediate_size=weights["blocks.0.mlp.fc1.weight"].shape[0],
        image_size=side * patch.shape[-1],
        patch_size=patch.shape[-1],
        num_channels=patch.shape[1],
        num_labels=weights["head.weight"].shape[0],
        qkv_bias="blocks.0.attn.qkv.bias" in weights,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
    )
    model = ViTForImageClassification(config)
    renamed = {new: tensor.float() for name, value in weights.items() for new, tensor in _rename(name, value)}
    result = model.load_state_dict(renamed, strict=False)
    if result.missing_keys or result.unexpected_keys:
        raise ValueError(f"source: missing {result.missing_keys}, left over {result.unexpected_keys}")
    return model.eval()


def load_vit(source: str | Path) -> tuple[Any, Preprocess]:
    """(model, preprocess): transformers' image classifier in fp32, for inference, and what turns images into its input.

    A checkpoint of ours gets the attention that it was trained with (`use_full_attention` undoes it), which
    `model.selection` tells: None for full attention, in models from elsewhere too. `model.classes` are the names of its
    classes in order; None where they are not known.

    Args:
        source: a checkpoint of ours, file or folder; a Hugging Face folder or id; a safetensors file with timm's names.

    Raises:
        ValueError: a source that is missing, unreadable, or none of these.
    """
    path = Path(source)
    if path.is_file():
        return _load_file(path)
    if (path / WEIGHTS).is_file() and METADATA in _metadata(path / WEIGHTS):
        return _load_file(path / WEIGHTS)
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"{path}: expected {WEIGHTS} of ours, or a Hugging Face folder with config.json")
    # An id is "owner/name"; what cannot be one is not asked for over the network.
    if not path.exists() and (path.suffix == ".safetensors" or path.is_absolute() or len(path.parts) > 2):
        raise ValueError(f"{path}: there is no such file or folder")
    return _load_huggingface(str(source))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """What a checkpoint of ours says of itself: config, preprocess, selection, classes and what its training added.

    Raises:
        ValueError: a file that is not one.
    """
    path = Path(path)
    path = path / WEIGHTS if path.is_dir() else path
    held = _metadata(path).get(METADATA)
    if held is None:
        raise ValueError(f"{path}: expected a checkpoint of levattention, with its config in the metadata")
    return json.loads(held)


def save_vit(
    path: str | Path,
    model: Any,
    preprocess: Preprocess,
    *,
    selection: Selection | None = None,
    classes: tuple[str, ...] | None = None,
    half: bool = True,
    **facts: Any,
) -> None:
    """Write a checkpoint: the weights, and in the file's metadata all that is needed to use them.

    Args:
        path: ends in .safetensors; replaced whole.
        model: a transformers `ViTForImageClassification`.
        preprocess: the model's own.
        selection: the attention it was trained with; None for full.
        classes: names of the labels.
        half: store fp16; it is loaded as fp32.
        **facts: what else `read_checkpoint` shall give back, as JSON has it.
    """
    from safetensors.torch import save_file

    about = {
        "config": model.config.to_diff_dict(),
        "preprocess": asdict(preprocess),
        "selection": None if selection is None else selection.as_dict(),
        "classes": classes,
        **facts,
    }
    dtype = torch.float16 if half else torch.float32
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()}
    with replacing(path) as temporary:
        save_file(weights, temporary, metadata={METADATA: json.dumps(about), "format": "pt"})


def _load_file(path: Path) -> tuple[Any, Preprocess]:
    """A safetensors file: ours if its metadata, or a config.json beside it, says what it is; timm's otherwise."""
    if METADATA not in _metadata(path):
        if (path.parent / "config.json").is_file() and path.name == WEIGHTS:
            return _load_huggingface(str(path.parent))
        model = vit_from_timm(path)
        model.selection = model.classes = None
        size, channels = _input_size(model)
        return model, Preprocess(IMAGENET_MEAN[:channels], IMAGENET_STD[:channels], size, channels)
    from transformers import ViTConfig

    about, weights = read_checkpoint(path), _weights(path)
    model = empty_vit(ViTConfig(**about["config"]), pre_logits="classifier.2.weight" in weights)
    try:
        model.load_state_dict({name: value.float() for name, value in weights.items()})
    except RuntimeError as error:
        raise ValueError(f"{path}: the weights do not fit its config ({error})") from None
    model.selection = None if about["selection"] is None else Selection(**about["selection"])
    model.classes = None if about["classes"] is None else tuple(about["classes"])
    numbers = about["preprocess"]
    preprocess = Preprocess(**numbers | {name: tuple(numbers[name]) for name in ("mean", "std")})
    return apply_selection(model.eval(), model.selection), preprocess


def _load_huggingface(source: str) -> tuple[Any, Preprocess]:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    try:
        model = AutoModelForImageClassification.from_pretrained(source, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: neither a file or folder here nor a model that can be fetched ({error})") from None
    size, channels = _input_size(model)
    try:
        about = AutoImageProcessor.from_pretrained(source).to_dict()
    except (OSError, ValueError):
        about = {}
    mean, std = about.get("image_mean") or IMAGENET_MEAN, about.get("image_std") or IMAGENET_STD
    if about.get("do_normalize") is False:
        mean, std = (0.0,) * channels, (1.0,) * channels
    resized = about.get("size") or {}
    shorter = resized.get("shortest_edge") or (about.get("do_center_crop") and resized.get("height")) or size
    model.selection = model.classes = None
    return model, Preprocess(tuple(mean[:channels]), tuple(std[:channels]), size, channels, min(1.0, size / shorter))


def _input_size(model: Any) -> tuple[int, int]:
    """(side, channels) of the images that a model takes."""
    size = model.config.image_size
    return (size if isinstance(size, int) else size[0]), model.config.num_channels


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable .safetensors file ({error})") from None


def _weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable .safetensors file ({error})") from None


def _rename(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """A timm entry under transformers' name; qkv as the three it holds."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    prefix, rest = (f"vit.layers.{block[1]}.", block[2]) if block else ("", name)
    stem, _, kind = rest.rpartition(".")
    if stem == "attn.qkv":
        parts = zip("qkv", value.chunk(3), strict=True)
        return [(f"{prefix}attention.{part}_proj.{kind}", tensor) for part, tensor in parts]
    if rest in _RENAMED:
        return [(_RENAMED[rest], value)]
    return [(f"{prefix}{_RENAMED.get(stem, stem)}.{kind}", value)]
