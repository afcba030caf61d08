"""The checksum of named tensors, and what is said about weights that do not fit."""

import hashlib
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miles_dmd2.models.weights import checksum, mismatch, not_finite, safetensors_shapes

BASE = {"b": torch.tensor([[1.0, -2.0]]), "a": torch.tensor(0.5)}


def test_checksum_by_hand() -> None:
    by_hand = hashlib.sha256()
    by_hand.update(b"a\0torch.float32\0[]\0" + struct.pack("<f", 0.5))
    by_hand.update(b"b\0torch.float32\0[1, 2]\0" + struct.pack("<2f", 1, -2))
    assert checksum(BASE) == by_hand.hexdigest()


def test_checksum_does_not_depend_on_order_strides_or_gradient() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    strided = value.t().contiguous().t().requires_grad_()
    assert not strided.is_contiguous()
    assert checksum({"x": value, "y": value}) == checksum({"y": strided, "x": value})


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.tensor([[1.0, -2.0]]), "c": torch.tensor(0.5)},
        {"b": torch.tensor([1.0, -2.0]), "a": torch.tensor(0.5)},
        {"b": torch.tensor([[1.0, -2.0]]), "a": torch.tensor(0.5, dtype=torch.float64)},
        {"b": torch.tensor([[1.0, -2.0000002]]), "a": torch.tensor(0.5)},
        {"b": torch.tensor([[1.0, -2.0]])},
        {"a": torch.tensor([[1.0, -2.0]]), "b": torch.tensor(0.5)},
    ],
)
def test_checksum_sees_every_difference(other: dict[str, torch.Tensor]) -> None:
    assert checksum(other) != checksum(BASE)


def test_checksum_sees_the_sign_of_zero_and_takes_bf16_and_empty_tensors() -> None:
    assert checksum({"x": torch.tensor(0.0)}) != checksum({"x": torch.tensor(-0.0)})
    assert checksum({"x": torch.ones(3, dtype=torch.bfloat16)}) != checksum({"x": torch.zeros(3, dtype=torch.bfloat16)})
    assert checksum({"x": torch.zeros(0)}) != checksum({})


def test_checksum_leaves_the_storage_resizable() -> None:
    """`Tensor.numpy()` forbids resizing for good, and sleep resizes."""
    value = torch.ones(4)
    checksum({"x": value})
    assert value.untyped_storage().resizable()


def test_mismatch_says_what_differs() -> None:
    shapes = {"a": (), "b": (1, 2)}
    assert mismatch(shapes, BASE) is None
    assert mismatch(shapes, {"b": BASE["b"], "x": BASE["a"]}) == "names differ, 1 missing: a; 1 unexpected: x"
    assert mismatch(shapes, BASE | {"b": torch.zeros(2)}) == "1 wrong shapes: b has [2], expected [1, 2]"
    many = mismatch({str(i): () for i in range(9)}, {})
    assert many == "names differ, 9 missing: 0, 1, 2 and 6 more"


def test_not_finite_says_where() -> None:
    assert not_finite(BASE) is None
    assert not_finite(BASE | {"n": torch.tensor([1.0, float("nan")])}) == "1 are not finite: n"
    assert not_finite({"i": torch.tensor([1])}) == "1 are not floating point: i"


def test_shapes_come_from_all_files_of_a_directory(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(())}, tmp_path / "model-00002-of-00002.safetensors")
    assert safetensors_shapes(tmp_path) == {"a": (2, 3), "b": ()}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        safetensors_shapes(tmp_path / "empty")
