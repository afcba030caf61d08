"""metadata.rm_type of a prompt file's lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_dmd2.config import ConfigError
from miles_dmd2.data.metadata import unscored_prompts
from miles_dmd2.data.prompts import load_prompts


def written(directory: Path, text: str, name: str = "p.jsonl") -> Path:
    file = directory / name
    file.write_bytes(text.encode())
    return file


def test_prompts_that_say_so_are_not_scored(tmp_path: Path) -> None:
    lines = [
        '{"prompt": " one "}',
        '{"prompt": "two", "metadata": {"rm_type": "none", "source": "x"}}',
        "",
        '{"prompt": "three", "metadata": {"source": "x"}}',
        '{"prompt": " four ", "metadata": {"rm_type": "none"}}',
        '{"prompt": "five", "metadata": null}',
        '{"prompt": "six", "metadata": {"rm_type": null}}',
    ]
    file = written(tmp_path, "\ufeff" + "\r\n".join(lines) + "\r\n")
    assert unscored_prompts(file) == {"two", "four"}
    assert {"two", "four"} < set(load_prompts(file))


def test_a_text_file_says_nothing_of_its_prompts(tmp_path: Path) -> None:
    assert unscored_prompts(written(tmp_path, '{"metadata": 3} is a prompt\n', "p.txt")) == frozenset()


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ('"none"', "metadata none: must be an object"),
        ("[1, 2]", "metadata 1 2: must be an object"),
        ('{"rm_type": "clip"}', "metadata.rm_type clip: must be none, or left out"),
        ('{"rm_type": ["none"]}', "metadata.rm_type ['none']"),
    ],
)
def test_another_form_is_refused_by_file_and_line(tmp_path: Path, metadata: str, told: str) -> None:
    file = written(tmp_path, f'{{"prompt": "one"}}\n{{"prompt": "two", "metadata": {metadata}}}\n')
    with pytest.raises(ConfigError) as caught:
        unscored_prompts(file, "--eval-prompt-data")
    assert str(caught.value).startswith(f"--eval-prompt-data {file}:2: {told}")


def test_a_prompt_that_is_both_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, '{"prompt": "one", "metadata": {"rm_type": "none"}}\n{"prompt": "one"}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: prompt one is there with metadata\.rm_type and without"):
        unscored_prompts(file)
