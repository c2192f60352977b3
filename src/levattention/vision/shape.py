"""The shape of a vision transformer, and one of that shape with fresh weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What transformers knows PyTorch's attention by, where no mask goes with it.
UNMASKED = "levattention-unmasked"


@dataclass(frozen=True)
class Shape:
    """Layers, widths and patches of a ViT with a class token.

    Attributes:
        image: side of the images.
        patch: side of the patches.
        channels: of the images.
        classes: how many.
        hidden: width of the tokens.
        layers: how many.
        heads: of each layer.
        mlp: width inside the two-layer perceptrons.
        pre_logits: whether a tanh layer stands before the classifier, as in the first ViTs.
        positions: "learned", or "sincos": fixed sines and cosines of the patch's row and column, none for the class
            token.
    """

    image: int
    patch: int
    channels: int
    classes: int
    hidden: int
    layers: int
    heads: int
    mlp: int
    pre_logits: bool = False
    positions: str = "learned"

    def __post_init__(self) -> None:
        if self.image % self.patch:
            raise ValueError(f"shape: expected whole patches, got {self.patch} for images of {self.image}")
        if self.hidden % self.heads:
            raise ValueError(f"shape: expected hidden a multiple of {self.heads} heads, got {self.hidden}")
        if self.positions not in ("learned", "sincos") or (self.positions == "sincos" and self.hidden % 4):
            raise ValueError(f"shape: expected positions learned, or sincos with hidden a multiple of 4, got {self}")

    @property
    def tokens(self) -> int:
        """The class token and the patches."""
        return 1 + (self.image // self.patch) ** 2

    def build(self, seed: int | None = None) -> Any:
        """transformers' `ViTForImageClassification` of this shape, ready to be trained.

        Initialised as big_vision does: Xavier's uniform weights, and a classifier of zeros.

        Args:
            seed: of the weights; None leaves them as transformers draws them (or on the meta device).
        """
        from transformers import ViTConfig

        config = ViTConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.mlp,
            image_size=self.image,
            patch_size=self.patch,
            num_channels=self.channels,
            num_labels=self.classes,
            hidden_act="gelu",
            layer_norm_eps=1e-6,
        )
        model = without_masks(empty_vit(config, self.pre_logits))
        if seed is not None:
            _initialise(model, torch.Generator().manual_seed(seed))
        if self.positions == "sincos":
            embeddings = model.vit.embeddings.position_embeddings
            embeddings.requires_grad_(False)
            if not embeddings.is_meta:
                embeddings.copy_(sine_positions(self.image // self.patch, self.hidden))
        return model


def empty_vit(config: Any, pre_logits: bool) -> Any:
    """transformers' model for a config, with a tanh layer before the classifier where asked for."""
    from transformers import ViTForImageClassification

    model = ViTForImageClassification(config)
    if pre_logits:
        before = nn.Linear(config.hidden_size, config.hidden_size)
        model.classifier = nn.Sequential(before, nn.Tanh(), model.classifier)
    return model


def without_masks(model: Any) -> Any:
    """The model itself, whose full attention is `scaled_dot_product_attention` without a mask.

    Under torch.compile transformers makes one that is True everywhere, expanded from one element. CUDA has no fused
    kernel for the strides of that. A name without a mask function gets no mask.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    model.set_attn_implementation(UNMASKED)
    return model


def sine_positions(side: int, hidden: int, temperature: float = 1e4) -> Tensor:
    """(1, 1 + side², hidden): zeros for the class token; sin x, cos x, sin y, cos y of each patch, in row order."""
    omega = temperature ** -(torch.arange(hidden // 4) / (hidden // 4 - 1 if hidden > 4 else 1))
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = [axis.flatten().unsqueeze(-1) * omega for axis in (x, y)]
    patches = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], -1)
    return torch.cat([torch.zeros(1, hidden), patches]).unsqueeze(0)


@torch.no_grad()
def _initialise(model: Any, generator: torch.Generator) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            # The fan of the convolution as a linear map of a patch.
            nn.init.xavier_uniform_(module.weight.view(len(module.weight), -1), generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    last: Any = model.classifier[-1] if isinstance(model.classifier, nn.Sequential) else model.classifier
    nn.init.zeros_(last.weight)
    embeddings = model.vit.embeddings
    nn.init.zeros_(embeddings.cls_token)
    width = embeddings.position_embeddings.shape[-1]
    nn.init.normal_(embeddings.position_embeddings, std=width**-0.5, generator=generator)
