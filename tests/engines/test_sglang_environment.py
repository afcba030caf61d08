"""Which Pythons are taken as an engine's, and what is said about the others; the plugin's folder."""

from __future__ import annotations

import os
import subprocess
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import setup_sglang

from miles_dmd2.engines.sglang import environment
from miles_dmd2.engines.sglang.environment import ENTRY_POINTS, TESTED, check_version, write_plugin
from tests.engines.engine_stand_in import make_engine

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without any package."""
    return make_engine(tmp_path_factory.mktemp("bare"), None, ("torch", "diffusers", "transformers", "sglang"))


def refusal(python: Path) -> str:
    """What check_version says: one line that begins with the flag and ends with a remedy."""
    with pytest.raises(ValueError, match=r"\A--sglang-python .*; .*\Z") as caught:
        check_version(python, allow_untested=False)
    text = str(caught.value)
    assert text.startswith(f"--sglang-python {python}: ")
    assert "name the Python of an environment with SGLang 0.5.23" in text
    return text


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_a_tested_version(tmp_path: Path, version: str) -> None:
    assert check_version(make_engine(tmp_path, version), allow_untested=False) == version


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23rc1", "0.5.24", "0.5.24.dev3", "0.6.0", "1.0", "0.5.230"])
def test_an_untested_version_needs_the_flag(tmp_path: Path, version: str) -> None:
    python = make_engine(tmp_path, version)
    text = refusal(python)
    assert f"SGLang {version} is outside the tested range >=0.5.23,<0.5.24" in text
    assert "--sglang-allow-untested-version" in text
    assert check_version(python, allow_untested=True) == version


def test_no_sglang(bare: Path) -> None:
    assert "has no SGLang" in refusal(bare)


@pytest.mark.parametrize("part", ["multimodal_gen", "diffusers", "torch"])
def test_sglang_without_its_diffusion_parts(tmp_path: Path, part: str) -> None:
    text = refusal(make_engine(tmp_path, "0.5.23", (part,)))
    assert "lacks its diffusion parts" in text
    assert part in text
    assert "requirements/sglang-cpu.txt" in text


def test_what_is_no_python(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "nothing")
    assert "there is no such file" in refusal(tmp_path)
    for name, text, mode, why in (
        ("plain", "", 0o644, "is not executable"),
        ("text", "not a program", 0o755, "Exec format error"),
        ("silent", "#!/bin/sh\n", 0o755, "exit code 0"),
        ("list", "#!/bin/sh\necho '[1]'\n", 0o755, "does not answer as a Python does"),
        ("broken", "#!/bin/sh\necho 'no libpython' >&2\nexit 127\n", 0o755, "no libpython"),
    ):
        file = tmp_path / name
        file.write_text(text)
        file.chmod(mode)
        assert why in refusal(file)


def test_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "slow"
    file.write_text("#!/bin/sh\nexec sleep 60\n")
    file.chmod(0o755)
    monkeypatch.setattr(environment, "_ASK_SECONDS", 0.3)
    assert "does not answer within 0.3 s" in refusal(file)


def test_it_is_asked_about_its_own_packages(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not about those of the trainer's environment or of the current directory."""
    other = make_engine(tmp_path / "other")
    (packages,) = (tmp_path / "other").glob("lib/python*/site-packages")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.chdir(packages)
    assert "has no SGLang" in refusal(bare)
    assert check_version(other, allow_untested=False) == "0.5.23"


def test_the_plugins_folder_is_found_by_an_engines_python(bare: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a plugin"
    write_plugin(folder)
    question = (
        "from importlib.metadata import entry_points, version; import miles_dmd2, sys\n"
        "(found,) = entry_points(group='sglang.multimodal_gen.plugins')\n"
        "print(found.name, found.value, version('miles-dmd2') == miles_dmd2.__version__)"
    )
    variables = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([bare, "-c", question], capture_output=True, text=True, timeout=60, env=variables)
    assert done.stdout.split() == ["miles_dmd2", "miles_dmd2.engines.sglang_plugin:register", "True"], done.stderr


def test_the_entry_point_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (group, entries) = next(iter(project["entry-points"].items()))
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    assert ENTRY_POINTS.splitlines() == lines
    ((name, value),) = entries.items()
    module = EntryPoint(name, value, group).module.split(".")
    assert ROOT.joinpath(*module).with_suffix(".py").is_file() or ROOT.joinpath(*module, "__init__.py").is_file()


def test_the_range_holds_what_is_installed_for_the_tests() -> None:
    """The version of the engine's test environment is the oldest of the range."""
    version = setup_sglang.SGLANG.removeprefix("sglang==")
    assert TESTED.startswith(f">={version},<")
