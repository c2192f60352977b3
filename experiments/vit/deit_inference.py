"""DeiT-Ti/16 without retraining: how much of its accuracy is left when every query sees k keys a head.

    python experiments/vit/deit_inference.py --data ../shared/data --out results

`data` holds vit/deit_tiny_patch16_224.safetensors (timm's names) and imagenet-dev (labels.csv and images). The same as
`levattention vit eval` with both. On one CPU core a row takes half a minute for 500 images, and Lewis weights three.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from levattention.cli.vit_look import evaluate


def main() -> None:
    """The inference table on DeiT-Ti/16."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    homes = [up / "shared" / "data" for up in Path(__file__).resolve().parents]
    default = next((home for home in homes if home.is_dir()), Path("..") / "shared" / "data")
    parser.add_argument("--data", type=Path, default=default, help=f"folder with vit/ and imagenet-dev/ ({default})")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--top-k", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--selectors", nargs="+", help="leverage, norm, random, lewis-P, local, sample, cluster, …")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has already")
    given = parser.parse_args()
    try:
        evaluate(
            model=str(given.data / "vit" / "deit_tiny_patch16_224.safetensors"),
            data=given.data / "imagenet-dev",
            out=given.out,
            images=given.images,
            top_k=given.top_k,
            selector=given.selectors,
            resume=given.resume,
        )
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
