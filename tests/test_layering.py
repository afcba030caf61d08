"""Imports go down only: the table of docs/architecture.md, checked on the source; and what an import may load."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = "miles_dmd2"
TYPING_ONLY = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}

LAYER_0 = {"types", "config", "observability", "run_directory", "private_directory", "stopping"}
LAYER_1 = {"algo", "data", "checkpointing"}
DOWN_TO_1 = LAYER_0 | LAYER_1
DOWN_TO_2 = DOWN_TO_1 | {"models"}
DOWN_TO_3 = DOWN_TO_2 | {"training", "engines", "media", "rewards", "sinks"}
DOWN_TO_4 = DOWN_TO_3 | {"driver", "evaluation", "cluster"}

# What each package may import of the project, beside itself. The root package, "", holds the version only.
INSIDE: dict[str, set[str]] = {
    "": set(),
    "types": set(),
    "observability": {"types"},
    "config": {"types", "observability"},
    "run_directory": {"config"},
    "private_directory": {"config"},
    "stopping": set(),
    "algo": set(),
    "data": LAYER_0 | {"algo"},
    "checkpointing": LAYER_0,
    "models": DOWN_TO_1,
    "training": DOWN_TO_2,
    "engines": DOWN_TO_2,
    "media": DOWN_TO_1,
    "rewards": DOWN_TO_1,
    "sinks": DOWN_TO_1,
    "cluster": DOWN_TO_3,
    "driver": DOWN_TO_1,
    "evaluation": DOWN_TO_1,
    "cli": DOWN_TO_4,
    "train_diffusion": DOWN_TO_4 | {"cli"},
    "recipes": DOWN_TO_4 | {"cli", "train_diffusion"},
    "benchmarks": DOWN_TO_4 | {"cli", "train_diffusion", "recipes"},  # a benchmark may run a recipe
}

# What of others: these packages import the standard library and no more than this. The rest import what they need,
# except Ray, which is cluster's alone.
OUTSIDE: dict[str, set[str]] = {
    "": set(),
    "types": set(),
    "observability": set(),
    "config": {"pydantic", "pydantic_core", "yaml"},
    "run_directory": set(),
    "private_directory": set(),
    "stopping": set(),
    "algo": {"torch"},
    "checkpointing": set(),
    "driver": set(),
    "evaluation": set(),
}
OF_ONE_PACKAGE = {"ray": "cluster", "wandb": "sinks"}


def package_of(module: str) -> str | None:
    """The row of the table that a dotted name belongs to; None for a module that is not ours."""
    head, _, rest = module.partition(".")
    if head == TOP:
        return rest.partition(".")[0]
    return head if head in INSIDE else None


def under_type_checking(tree: ast.Module) -> set[ast.AST]:
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) in TYPING_ONLY]
    return {node for guard in guards for statement in guard.body for node in ast.walk(statement)}


def imported(source: str, modules: set[str]) -> Iterator[tuple[int, str, bool]]:
    """Line, dotted name and "for type checkers only" of each import, wherever in the file, also by import_module."""
    tree = ast.parse(source)
    typing_only = under_type_checking(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            inner = [f"{base}.{alias.name}" for alias in node.names]
            ours = [n if n in modules or (base == TOP and package_of(n) in INSIDE) else base for n in inner]
            names = list(dict.fromkeys(ours))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
        yield from ((node.lineno, name, node in typing_only) for name in names)


def violations(module: str, source: str, modules: set[str]) -> list[str]:
    """What `module` imports and may not, in words."""
    package = package_of(module)
    if package not in INSIDE:
        return [f"{module}: {package!r} is not in the table: give it a layer"]
    found = []
    for line, name, typing_only in imported(source, modules):
        other = package_of(name)
        where = f"{module}:{line}: {package or TOP} imports {name}"
        if name.startswith("."):
            found.append(f"{where}: relative")
        elif other is not None:
            if other != package and other not in INSIDE[package] and name != TOP:
                found.append(f"{where}: not a layer below")
        else:
            head = name.partition(".")[0]
            if head in OF_ONE_PACKAGE and OF_ONE_PACKAGE[head] != package:
                found.append(f"{where}: only {OF_ONE_PACKAGE[head]} may")
            elif head not in sys.stdlib_module_names | OUTSIDE.get(package, {head}) and not typing_only:
                found.append(f"{where}: more than this package may load")
    return found


def project() -> dict[str, str]:
    """Dotted name -> source of every module of the project, tests and scripts aside."""
    files = [
        *ROOT.glob(f"{TOP}/**/*.py"),
        *ROOT.glob("recipes/**/*.py"),
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("train_diffusion.py"),
    ]
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file.read_text()
        for file in files
    }


def module_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules that it imports when it runs; also from inside functions."""
    return {
        module: {n for _, n, typing_only in imported(source, set(sources)) if n in sources and not typing_only}
        for module, source in sources.items()
    }


def test_imports_go_down_only() -> None:
    sources = project()
    assert len(sources) > 10, "found hardly any module: is the test looking in the right place?"
    found = [text for module, source in sources.items() for text in violations(module, source, set(sources))]
    assert not found, "\n" + "\n".join(found)


def test_the_table_and_the_modules_have_no_cycle() -> None:
    graphlib.TopologicalSorter(INSIDE).prepare()
    graphlib.TopologicalSorter(module_graph(project())).prepare()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("miles_dmd2.algo.flow", "import numpy"),
        ("miles_dmd2.algo.flow", "from miles_dmd2.types import Role"),
        ("miles_dmd2.config.schema", "def late():\n    import torch"),
        ("miles_dmd2.config.schema", "from miles_dmd2 import algo"),
        ("miles_dmd2.types", "import pydantic"),
        ("miles_dmd2.types", "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    import torch"),
        ("miles_dmd2.data.prompts", "from miles_dmd2.models.base import Adapter"),
        ("miles_dmd2.models.base", "import ray"),
        ("miles_dmd2.training.core", "from miles_dmd2.engines import local"),
        (
            "miles_dmd2.training.core",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import miles_dmd2.engines",
        ),
        ("miles_dmd2.engines.local", "import miles_dmd2.training.core"),
        ("miles_dmd2.engines.local", "from ..training import core"),
        ("miles_dmd2.media.gallery", "import wandb"),
        ("miles_dmd2.driver", "import torch"),
        ("miles_dmd2.driver", "import requests"),
        ("miles_dmd2.driver", "from miles_dmd2.engines.base import Engine"),
        ("miles_dmd2.evaluation", "from miles_dmd2.cluster import groups"),
        ("miles_dmd2.cluster.groups", "from miles_dmd2.driver import train"),
        ("miles_dmd2.cluster.groups", "import importlib\nimportlib.import_module('miles_dmd2.cli')"),
        ("miles_dmd2.cli", "from recipes.digits import run"),
        ("train_diffusion", "from ray import init"),
        ("miles_dmd2.utils", ""),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, source, set(project()))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("miles_dmd2.algo.flow", "import math\nimport torch\nfrom miles_dmd2.algo import checks"),
        ("miles_dmd2.types", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("miles_dmd2.cluster.groups", "import ray\nfrom miles_dmd2.training import core\nimport miles_dmd2.engines"),
        ("miles_dmd2.cli", "from miles_dmd2 import __version__\nfrom miles_dmd2.driver import train"),
        ("recipes.digits.run", "import sklearn\nimport train_diffusion\nfrom miles_dmd2.cluster import groups"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert not violations(module, source, set(project()))


def test_a_cycle_is_found() -> None:
    sources = {"miles_dmd2.algo.a": "from miles_dmd2.algo import b", "miles_dmd2.algo.b": "import miles_dmd2.algo.a"}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(module_graph(sources)).prepare()


HEAVY = {"ray", "diffusers", "transformers", "wandb"}


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        ("config", HEAVY | {"torch", "numpy"}),
        ("types", HEAVY | {"torch", "numpy", "pydantic"}),
        ("observability", HEAVY | {"torch", "numpy", "pydantic"}),
        ("algo", HEAVY | {"pydantic", "yaml", "safetensors"}),
        ("driver", HEAVY | {"safetensors", "miles_dmd2.engines", "miles_dmd2.models", "miles_dmd2.cluster"}),
        ("evaluation", HEAVY | {"safetensors", "miles_dmd2.engines", "miles_dmd2.models", "miles_dmd2.cluster"}),
    ],
)
def test_what_an_import_loads(package: str, unwanted: set[str]) -> None:
    """In a fresh process, every module of the package: none of the unwanted is loaded, not even by others."""
    modules = [module for module in project() if package_of(module) == package]
    assert modules, f"{TOP}.{package} is missing"
    code = "import importlib, sys; [importlib.import_module(m) for m in sys.argv[1:]]; print(*sys.modules)"
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & unwanted
    assert set(modules) <= loaded
