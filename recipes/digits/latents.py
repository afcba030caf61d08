"""Encode the digits with the pipeline's VAE, once, for --dmd2-student-input forward_noise.

python recipes/digits/latents.py --output runs/digits-latents.safetensors
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from miles_dmd2.data.latents import LatentFile, write_latents
from miles_dmd2.models.checkpoint import component_digest
from miles_dmd2.models.registry import build_adapter
from recipes.digits import data

PIPELINE = Path(__file__).parent / "pipeline"


def build(output: Path, count: int = data.COUNT, pipeline: Path = PIPELINE) -> LatentFile:
    """The first `count` digits as latents with their prompts. ValueError: the file exists."""
    digits = data.load(count)
    adapter = build_adapter(pipeline, data.IMAGE_SIZE, data.IMAGE_SIZE)
    components = adapter.load_components()
    parts = []
    for grey in digits.grey.split(64):
        pictures = data.enlarge(grey).permute(0, 2, 3, 1).unsqueeze(1)
        pixels = ((pictures * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        parts.append(adapter.encode(components, pixels))
    prompts = tuple(data.prompt_of(int(label)) for label in digits.labels)
    content = LatentFile(torch.cat(parts), prompts, component_digest(pipeline, "vae"))
    write_latents(output, content)
    return content


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=data.COUNT, help="the first so many digits")
    arguments = parser.parse_args(argv)
    try:
        content = build(arguments.output, arguments.count)
    except ValueError as error:
        parser.error(str(error))
    print(f"{arguments.output}: {len(content.prompts)} latents {list(content.latents.shape[1:])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
