"""A vision transformer and images small enough to write out."""

import torch

from levattention.vision.images import ArrayImages
from levattention.vision.preprocess import Preprocess


def tiny_vit(seed=0, **changes):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    about = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    about |= {"image_size": 12, "patch_size": 2, "num_channels": 1, "num_labels": 7}
    model = ViTForImageClassification(ViTConfig(**about | changes)).eval()
    for name, parameter in model.named_parameters():
        # Larger than the initial ones, so that attention is far from even.
        torch.nn.init.normal_(parameter, std=0.5)
        if "patch_embeddings" in name or "position" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    return model


PREPARE = Preprocess((0.5,), (0.25,), 12, 1)


def some_images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 1, 12, 12), generator=generator, dtype=torch.uint8)
    return ArrayImages("noise", pixels, torch.arange(count) % 7)
