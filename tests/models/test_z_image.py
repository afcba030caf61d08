"""What is peculiar to Z-Image; what every family must do is in test_families.py."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from miles_dmd2.algo import normal
from miles_dmd2.models.z_image import ZImageAdapter
from tests.tiny_z_image import TEXT_WIDTH, build

PADDED, WHOLE = (48, 32), (64, 128)  # 3 x 2 tokens, padded to 32; 4 x 8 tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "z_image")


def velocity(adapter: ZImageAdapter, transformer: nn.Module, length: int) -> Tensor:
    cond = adapter.collate([{"prompt_embeds": normal(3, (length, TEXT_WIDTH))}])
    return adapter.velocity(transformer, adapter.initial_noise(0)[None], torch.tensor([0.7]), cond)


@pytest.mark.parametrize(("size", "idle"), [(PADDED, set()), (WHOLE, {"x_pad_token"})])
def test_the_canvas_decides_whether_the_pictures_padding_is_trained(
    checkpoint: Path, size: tuple[int, int], idle: set[str]
) -> None:
    adapter = ZImageAdapter(checkpoint, *size)
    transformer = adapter.load_transformer()
    velocity(adapter, transformer, 8).square().mean().backward()
    useless = {name for name, p in transformer.named_parameters() if p.grad is None or not p.grad.any()}
    assert adapter.idle_parameters(transformer).keys() == useless == idle


def test_the_picture_at_the_published_size_needs_no_padding(checkpoint: Path) -> None:
    adapter = ZImageAdapter(checkpoint, 1024, 1024)
    assert adapter.idle_parameters(adapter.load_transformer()) == {"x_pad_token": "zero"}


def test_lengths_travel_only_when_they_differ(checkpoint: Path) -> None:
    adapter = ZImageAdapter(checkpoint, *PADDED)
    row = {"prompt_embeds": normal(1, (4, TEXT_WIDTH))}
    assert set(adapter.collate([row, row])) == {"prompt_embeds"}
    batch = adapter.collate([row, {"prompt_embeds": row["prompt_embeds"][:2]}])
    assert batch["prompt_lengths"].tolist() == [4, 2]


def test_a_served_prompt_loses_its_copied_rows(checkpoint: Path) -> None:
    adapter = ZImageAdapter(checkpoint, *PADDED)
    padded = normal(1, (32, TEXT_WIDTH))
    found = adapter.serving.conditioning({"encoder_hidden_states": [padded], "caption_valid_lens": torch.tensor(5)})
    assert torch.equal(found["prompt_embeds"], padded[:5])
    with pytest.raises(ValueError, match=r"caption_valid_lens must be in \[1, 32\], got 33"):
        adapter.serving.conditioning({"encoder_hidden_states": [padded], "caption_valid_lens": torch.tensor(33)})
