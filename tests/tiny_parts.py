"""What the tiny pipelines share: tokenizers that know a few words, and a VAE for pictures."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "</s>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>")
WORDS = "a red green blue circle square moving left right up down user assistant"
CHAT = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
PROMPTS = ("a red circle", "a blue square moving left", "a green circle moving " + "up down " * 16)


def word_tokenizer(longest: int, eos: str = "<|im_end|>", *, append_eos: bool = False) -> PreTrainedTokenizerFast:
    """One token a word, or a character where the word is not known; with a chat template for those who apply it."""
    tokens = [*SPECIAL, *map(chr, range(33, 127)), *WORDS.split()]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    if append_eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, vocabulary[eos])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=eos, unk_token="<unk>", model_max_length=longest
    )
    fast.chat_template = CHAT
    return fast


def image_vae(scaling_factor: float, shift_factor: float) -> Any:
    """The AutoencoderKL of SD3 and Z-Image: 16 channels, 8 x 8 pixels to one latent pixel."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=64,  # SGLang decodes larger pictures in overlapping tiles, diffusers does not
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
    )
