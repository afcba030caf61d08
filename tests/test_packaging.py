"""The lock, pyproject.toml and the installed environment say the same."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import miles_dmd2

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VENV = ROOT / ".venv"
of_make_setup = pytest.mark.skipif(
    not (VENV.exists() and VENV.samefile(sys.prefix)), reason="this Python is not the one of .venv"
)
OUTSIDE_THE_LOCK = {"wandb"}  # extras that `make setup` does not install


def read_lock(text: str) -> dict[str, Version]:
    """Name -> version; raises on a line that pins nothing, a local version and a name that is there twice."""
    pins: dict[str, Version] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        found = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9A-Za-z.]+)", line)
        assert found, f"not a plain pin: {line!r}"
        name = canonicalize_name(found[1])
        assert name not in pins, f"{name} is pinned twice"
        pins[name] = Version(found[2])
    return pins


LOCK = read_lock((ROOT / "requirements" / "lock.txt").read_text())


def unmet(requirements: list[str], pins: dict[str, Version]) -> list[str]:
    return [
        text
        for text in requirements
        if (need := Requirement(text)).specifier and pins.get(canonicalize_name(need.name)) not in need.specifier
    ]


@pytest.mark.parametrize("line", ["torch==2.13.0+cpu", "numpy>=2", "numpy", "ray==2.60.0\nRay==2.60.0"])
def test_a_lock_that_does_not_pin_is_refused(line: str) -> None:
    with pytest.raises(AssertionError):
        read_lock(line)


def test_the_lock_meets_every_range() -> None:
    extras = PROJECT["optional-dependencies"]
    groups = {"": PROJECT["dependencies"], **{k: v for k, v in extras.items() if k not in OUTSIDE_THE_LOCK}}
    for extra, requirements in groups.items():
        assert not unmet(requirements, LOCK), f"outside the ranges of {extra or 'dependencies'}"
    assert unmet(["torch<2.13"], LOCK)
    assert unmet(["no-such-package>=1"], LOCK)


def test_every_requirement_has_a_lower_bound() -> None:
    for group in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]:
        for text in group:
            assert any(spec.operator in (">=", "==") for spec in Requirement(text).specifier), text


def test_nothing_brings_torchvision() -> None:
    assert not {name for name in LOCK if name in ("torchvision", "torchaudio", "timm")}


@of_make_setup
def test_version() -> None:
    assert importlib.metadata.version("miles-dmd2") == miles_dmd2.__version__


def closure(root: str, extras: tuple[str, ...]) -> set[str]:
    """Names of what `root` with `extras` needs, all the way down, by the metadata of what is installed."""
    seen: set[tuple[str, str]] = set()
    pending = [(canonicalize_name(root), extra) for extra in ("", *extras)]
    while pending:
        name, extra = key = pending.pop()
        if key in seen:
            continue
        seen.add(key)
        for text in importlib.metadata.requires(name) or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({**default_environment(), "extra": extra}):
                pending += [(canonicalize_name(need.name), e) for e in ("", *need.extras)]
    return {name for name, _ in seen} - {canonicalize_name(root)}


@of_make_setup
def test_the_environment_is_the_lock() -> None:
    installed = {canonicalize_name(d.name): Version(d.version) for d in importlib.metadata.distributions()}
    different = {
        n: (str(v), str(installed.get(n)))
        for n, v in LOCK.items()
        if n not in installed or installed[n].public != str(v)
    }
    assert not different, "not what the lock says: distclean and set up again"
    with_cuda = re.compile(r"nvidia-|cuda-|triton$")  # pinned by torch's CUDA build itself
    loose = {name for name in closure("miles-dmd2", ("dev", "digits")) - set(LOCK) if not with_cuda.match(name)}
    assert not loose, "needed, and not in the lock"
