"""Build the digits teacher: a tiny, complete Qwen-Image pipeline, trained here, once, and committed.

    python recipes/digits/build_teacher.py --output recipes/digits/pipeline

Trains the classifier (seconds), the VAE and the flow-matching teacher (minutes), then writes a diffusers
pipeline of about 2 MB and ``manifest.json`` (SHA-256 and size of each file, settings, final losses). Same
seed, thread count and machine type: same bytes. ``--smoke`` runs every step in seconds, for tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from miles_dmd2.algo import add_noise, critic_loss, rollout, shift_sigma, sigma_grid
from miles_dmd2.models.planar import planar_convolutions
from miles_dmd2.models.qwen_image import pack, unpack
from recipes.digits import classifier, data

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<unk>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE_WORDS = (
    "system user assistant Describe the image by detailing color shape size texture quantity text spatial "
    "relationships of objects and background You are a helpful digit"
)
TEXT_WIDTH = 32
TOKEN_ROWS = data.IMAGE_SIZE // 16  # the VAE compresses 8x, a token is 2x2 latent pixels


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result; it goes into the manifest."""

    seed: int = 0
    threads: int = 1
    digits: int = 1797
    vae_steps: int = 2500
    vae_batch: int = 16
    vae_lr: float = 4e-3
    vae_kl: float = 2e-5
    vae_channels: int = 8
    teacher_steps: int = 14000
    teacher_batch: int = 64
    teacher_lr: float = 2e-3
    teacher_layers: int = 2
    teacher_heads: int = 2
    teacher_sigma_shift: float = 3.0
    teacher_ema: float = 0.9995
    measured_steps: tuple[int, ...] = (1, 2, 4, 8, 50)


# -- text -------------------------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words, newlines and punctuation as tokens, so that the template is as long as the real tokenizer makes it."""
    words = list(SPECIAL_TOKENS) + ["\n"] + [chr(code) for code in range(33, 127)]
    words += TEMPLATE_WORDS.split() + list(data.WORDS)
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.Split(Regex("[ \t]+"), "removed"),
            pre_tokenizers.Punctuation(),
        ]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        model_max_length=1024,
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def build_text_encoder(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> Qwen2_5_VLForConditionalGeneration:
    """A fixed random Qwen2.5-VL: it only has to give ten prompts ten well separated embeddings."""
    token = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            "initializer_range": 0.2,
            "pad_token_id": token("<|endoftext|>"),
            "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "patch_size": 14,
            "fullatt_block_indexes": [0],
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(settings.seed)
    return Qwen2_5_VLForConditionalGeneration(config).eval().requires_grad_(False)


def check_template(tokenizer: PreTrainedTokenizerFast) -> int:
    """Refuse a tokenizer that makes the pipeline drop too much or too little; returns the prompt's kept length."""
    pipeline = QwenImagePipeline.__new__(QwenImagePipeline)
    scheduler = FlowMatchEulerDiscreteScheduler()
    QwenImagePipeline.__init__(pipeline, scheduler, None, None, tokenizer, None)  # type: ignore[arg-type]
    template, dropped = pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx
    prefix = len(tokenizer(template.split("{}")[0])["input_ids"])
    if prefix != dropped:
        raise ValueError(
            f"the tokenizer makes the prompt template's prefix {prefix} tokens long, but QwenImagePipeline drops "
            f"{dropped}: every prompt would lose its beginning or keep part of the template. Fix build_tokenizer."
        )
    encoded = [tokenizer(template.format(prompt))["input_ids"] for prompt in data.PROMPTS]
    lengths = {len(ids) - dropped for ids in encoded}
    if len(lengths) != 1:
        raise ValueError(f"the ten prompts must have one token length, but have {sorted(lengths)}")
    if any(tokenizer.unk_token_id in ids for ids in encoded):
        raise ValueError("a word of the prompt template or of a prompt is not in the tokenizer's vocabulary")
    return lengths.pop()


# -- VAE --------------------------------------------------------------------------------------------------


def build_vae(settings: Settings) -> AutoencoderKLQwenImage:
    torch.manual_seed(settings.seed)
    vae = AutoencoderKLQwenImage(base_dim=settings.vae_channels, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    with torch.no_grad():
        for module in vae.modules():  # a single frame never meets these slices: zero, rather than random bytes
            if isinstance(module, QwenImageCausalConv3d):
                module.weight[:, :, :-1] = 0
    return vae


def encode(vae: AutoencoderKLQwenImage, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures -> posterior mean and log variance ``[n, 16, h, w]``."""
    moments = vae.quant_conv(vae.encoder(pictures.unsqueeze(2))).squeeze(2)
    mean, log_variance = moments.chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode(vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    """Latents ``[n, 16, h, w]`` -> pictures, not clamped."""
    return vae.decoder(vae.post_quant_conv(latents.unsqueeze(2))).squeeze(2)


def train_vae(vae: AutoencoderKLQwenImage, digits: data.Digits, settings: Settings) -> dict[str, float]:
    """Squared error and a small KL term; the last tenth of the steps' mean losses are returned."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    optimizer = torch.optim.Adam(vae.parameters(), lr=settings.vae_lr, betas=(0.9, 0.99))
    tail: list[tuple[float, float]] = []
    began = time.monotonic()
    for step in range(settings.vae_steps):
        _set_rate(optimizer, settings.vae_lr * _warm_cosine(step, settings.vae_steps))
        index = torch.randint(len(digits), (settings.vae_batch,), generator=generator)
        pictures = data.enlarge(digits.grey[index])
        mean, log_variance = encode(vae, pictures)
        latents = mean + (0.5 * log_variance).exp() * torch.randn(mean.shape, generator=generator)
        error = functional.mse_loss(decode(vae, latents), pictures)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        optimizer.zero_grad(set_to_none=True)
        (error + settings.vae_kl * divergence).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step + 1 >= settings.vae_steps * 0.9:
            tail.append((error.item(), divergence.item()))
        _report("VAE", step, settings.vae_steps, error.item(), began)
    errors, divergences = zip(*tail, strict=True)
    return {"vae_squared_error": sum(errors) / len(tail), "vae_divergence": sum(divergences) / len(tail)}


@torch.no_grad()
def measure_latents(vae: AutoencoderKLQwenImage, digits: data.Digits) -> Tensor:
    """Posterior modes of all digits; writes their per-channel mean and deviation into the VAE's config."""
    latents = torch.cat([encode(vae, data.enlarge(grey))[0] for grey in digits.grey.split(128)])
    mean, deviation = latents.mean(dim=(0, 2, 3)), latents.std(dim=(0, 2, 3))
    vae.register_to_config(
        latents_mean=[round(value, 6) for value in mean.tolist()],
        latents_std=[round(value, 6) for value in deviation.tolist()],
    )
    return latents


def normalise(vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(v).view(1, -1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    return (latents - mean) / deviation


def denormalise(vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(v).view(1, -1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    return latents * deviation + mean


@torch.no_grad()
def to_pictures(vae: AutoencoderKLQwenImage, tokens: Tensor) -> Tensor:
    """Packed normalised latents -> pictures in [-1, 1]."""
    latents = denormalise(vae, unpack(tokens, TOKEN_ROWS, TOKEN_ROWS))
    return torch.cat([decode(vae, part).clamp(-1, 1) for part in latents.split(128)])


# -- teacher ----------------------------------------------------------------------------------------------


def build_transformer(settings: Settings) -> QwenImageTransformer2DModel:
    torch.manual_seed(settings.seed)
    return QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=settings.teacher_layers,
        attention_head_dim=32,
        num_attention_heads=settings.teacher_heads,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )


def velocity(transformer: QwenImageTransformer2DModel, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """The transformer's velocity (noise - x0) for packed latents; its timestep is sigma itself."""
    side = math.isqrt(x.shape[1])
    shapes = [[(1, side, side)]] * len(x)
    return transformer(x, encoder_hidden_states=text, timestep=sigma, img_shapes=shapes, return_dict=False)[0]


def train_teacher(
    transformer: QwenImageTransformer2DModel, tokens: Tensor, text: Tensor, settings: Settings
) -> dict[str, float]:
    """Flow matching on the digits' latents; leaves the average of the weights in ``transformer``."""
    generator = torch.Generator().manual_seed(settings.seed + 2)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=settings.teacher_lr, betas=(0.9, 0.99), weight_decay=0)
    average = {name: value.detach().clone() for name, value in transformer.state_dict().items()}
    tail: list[float] = []
    began = time.monotonic()
    for step in range(settings.teacher_steps):
        _set_rate(optimizer, settings.teacher_lr * _warm_cosine(step, settings.teacher_steps))
        index = torch.randint(len(tokens), (settings.teacher_batch,), generator=generator)
        x0, noise = tokens[index], torch.randn(tokens[index].shape, generator=generator)
        sigma = shift_sigma(torch.rand(len(x0), generator=generator), settings.teacher_sigma_shift)
        x = add_noise(x0, noise, sigma)
        loss = critic_loss(velocity(transformer, x, sigma, text[index]), x, sigma, noise, x0, space="velocity")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        decay = min(settings.teacher_ema, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, value in transformer.state_dict().items():
                average[name].lerp_(value, 1 - decay)
        if step + 1 >= settings.teacher_steps * 0.9:
            tail.append(loss.item())
        _report("teacher", step, settings.teacher_steps, loss.item(), began)
    transformer.load_state_dict(average)
    return {"teacher_loss": sum(tail) / len(tail)}


@torch.no_grad()
def sample(transformer: QwenImageTransformer2DModel, noise: Tensor, text: Tensor, steps: int) -> Tensor:
    """Euler steps on the uniform grid."""
    parts = []
    for start, condition in zip(noise.split(256), text.split(256), strict=True):
        predict = partial(velocity, transformer, text=condition)
        parts.append(rollout(predict, start, sigma_grid(steps, 1.0), steps - 1)[1])
    return torch.cat(parts)


# -- shared -----------------------------------------------------------------------------------------------


def _warm_cosine(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _report(what: str, step: int, steps: int, loss: float, began: float) -> None:
    if (step + 1) % 250 == 0 or step + 1 == steps:
        print(f"{what} step {step + 1}/{steps} loss {loss:.4f} {time.monotonic() - began:.0f} s", flush=True)


# -- the whole build --------------------------------------------------------------------------------------


def build(settings: Settings, output: Path, weights: Path | None = None) -> dict[str, Any]:
    """Everything, in order; writes ``output`` and the classifier's ``weights``; returns the manifest."""
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    began = time.monotonic()
    digits = data.load(settings.digits)
    tokenizer = build_tokenizer()
    kept = check_template(tokenizer)
    text_encoder = build_text_encoder(tokenizer, settings)
    vae = build_vae(settings)
    transformer = build_transformer(settings)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)
    pipeline = QwenImagePipeline(scheduler, vae, text_encoder, tokenizer, transformer)
    judge = classifier.train(digits, settings.seed)
    text = pipeline.encode_prompt(list(data.PROMPTS))[0].detach()[digits.labels]
    with planar_convolutions(vae):
        losses = train_vae(vae, digits, settings)
        tokens = pack(normalise(vae, measure_latents(vae, digits)))
        losses |= train_teacher(transformer, tokens, text, settings)
        transformer.requires_grad_(False)
        figures = measure(vae, transformer, judge, digits, tokens, text, settings)
    pipeline.save_pretrained(output, safe_serialization=True)
    weights = weights or output.parent / classifier.WEIGHTS.name
    classifier.save(judge, weights)
    manifest = {
        "settings": asdict(settings),
        "prompt_tokens": kept,
        "losses": losses,
        "figures": figures,
        "parameters": {
            "transformer": sum(p.numel() for p in transformer.parameters()),
            "vae": sum(p.numel() for p in vae.parameters()),
            "text_encoder": sum(p.numel() for p in text_encoder.parameters()),
        },
        "torch": torch.__version__,
        "files": hash_files(output),
        "classifier": hash_file(weights),
    }
    (output / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"built {output} in {time.monotonic() - began:.0f} s")
    return manifest


@torch.no_grad()
def measure(
    vae: AutoencoderKLQwenImage,
    transformer: QwenImageTransformer2DModel,
    judge: classifier.Classifier,
    digits: data.Digits,
    tokens: Tensor,
    text: Tensor,
    settings: Settings,
) -> dict[str, Any]:
    """The teacher's Frechet distance to the reconstructed digits and its label accuracy, by number of steps."""
    pictures = to_pictures(vae, tokens)
    reference = classifier.features(judge, pictures)
    enlarged = classifier.features(judge, data.enlarge(digits.grey))
    floor = classifier.frechet_floor(reference, digits.labels)
    figures: dict[str, Any] = {
        "floor": floor.value,
        "floor_deviation": floor.deviation,
        "reconstruction_to_data": classifier.frechet_distance(reference, enlarged),
        "reconstruction_accuracy": classifier.label_accuracy(judge, pictures, digits.labels),
    }
    noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(settings.seed + 3))
    for steps in settings.measured_steps:
        pictures = to_pictures(vae, sample(transformer, noise, text, steps))
        found = classifier.frechet_with_bootstrap(classifier.features(judge, pictures), reference)
        accuracy = classifier.label_accuracy(judge, pictures, digits.labels)
        figures[f"teacher_{steps}"] = {"frechet": found.value, "deviation": found.deviation, "accuracy": accuracy}
        print(f"teacher, {steps} steps: Frechet distance {found}, accuracy {accuracy:.3f}", flush=True)
    return figures


def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """SHA-256 and size of every file in the folder, but not of the manifest itself."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json")
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in files}


def hash_file(path: Path) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "size": path.stat().st_size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="the pipeline; beside it, classifier.safetensors")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--threads", type=int, default=Settings.threads)
    parser.add_argument("--vae-steps", type=int, default=Settings.vae_steps)
    parser.add_argument("--teacher-steps", type=int, default=Settings.teacher_steps)
    parser.add_argument("--smoke", action="store_true", help="100 digits, three steps of each training: for tests")
    args = parser.parse_args()
    settings = Settings(
        seed=args.seed, threads=args.threads, vae_steps=args.vae_steps, teacher_steps=args.teacher_steps
    )
    if args.smoke:
        settings = replace(settings, digits=100, vae_steps=3, teacher_steps=3, measured_steps=(1, 2))
    build(settings, args.output)


if __name__ == "__main__":
    main()
