"""Encode pictures with a pipeline's VAE, once, for --dmd2-student-input forward_noise.

    python scripts/encode_latents.py --hf-checkpoint PIPELINE --data pictures.jsonl --output latents.safetensors

Each line of the data is {"image": PATH, "prompt": TEXT}, or for clips {"frames": [PATH, ...], "prompt": TEXT} with as
many as --diffusion-num-frames; paths are relative to the file. Pictures are resized to the canvas.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from miles_dmd2.data.latents import LatentFile, write_latents
from miles_dmd2.models.checkpoint import component_digest
from miles_dmd2.models.registry import build_adapter


def read_data(path: Path, num_frames: int) -> list[tuple[list[Path], str]]:
    """(pictures, prompt) of each line. ValueError: a line that is not as said, or has another number of frames."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            names = record["frames"] if "frames" in record else [record["image"]]
            rows.append(([path.parent / name for name in names], str(record["prompt"]).strip()))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f'{path}:{number}: not {{"image": PATH, "prompt": TEXT}} ({error!r})') from None
        if len(rows[-1][0]) != num_frames:
            raise ValueError(
                f"{path}:{number}: has {len(rows[-1][0])} frames, the canvas {num_frames}; see --diffusion-num-frames"
            )
    if not rows:
        raise ValueError(f"{path}: holds no pictures")
    return rows


def batches(clips: Sequence[Sequence[Path]], height: int, width: int, size: int) -> Iterator[Tensor]:
    """uint8 `[size, frames, height, width, 3]`."""

    def pixels(path: Path) -> np.ndarray:
        return np.asarray(Image.open(path).convert("RGB").resize((width, height)))

    for start in range(0, len(clips), size):
        yield torch.from_numpy(np.stack([np.stack([*map(pixels, clip)]) for clip in clips[start : start + size]]))


def build(checkpoint: Path, data: Path, output: Path, canvas: Sequence[int | None], batch: int) -> LatentFile:
    """`canvas`: height, width and frames, None for the checkpoint's own. ValueError: data, canvas, or the output
    exists.
    """
    adapter = build_adapter(checkpoint, *canvas)
    rows = read_data(data, adapter.num_frames)
    components = adapter.load_components()
    pictures = batches([clip for clip, _ in rows], adapter.height, adapter.width, batch)
    latents = torch.cat([adapter.encode(components, pixels) for pixels in pictures])
    content = LatentFile(latents, tuple(prompt for _, prompt in rows), component_digest(checkpoint, "vae"))
    write_latents(output, content)
    return content


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="jsonl")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--diffusion-height", type=int)
    parser.add_argument("--diffusion-width", type=int)
    parser.add_argument("--diffusion-num-frames", type=int)
    parser.add_argument("--batch-size", type=int, default=16)
    chosen = parser.parse_args(argv)
    canvas = (chosen.diffusion_height, chosen.diffusion_width, chosen.diffusion_num_frames)
    try:
        content = build(chosen.hf_checkpoint, chosen.data, chosen.output, canvas, chosen.batch_size)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{chosen.output}: {len(content.prompts)} latents {list(content.latents.shape[1:])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
