"""What may not be called anywhere, and names of files that no input decides. See docs/security.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from miles_dmd2.media.gallery import save_eval_media
from miles_dmd2.media.store import EvalMedia, KeptMedia
from miles_dmd2.types import RolloutSample, WeightVersion

ROOT = Path(__file__).parent.parent
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
# Writes pickles that SGLang's own server reads, and reads none.
PICKLES_FOR_SGLANG = "miles_dmd2/engines/sglang/weights.py"
CALLS = {
    "pickle.load": "unpickles",
    "pickle.loads": "unpickles",
    "pickle.Unpickler": "unpickles",
    "torch.load": "unpickles",
    "torch.save": "pickles",
    "np.load": "may unpickle",
    "numpy.load": "may unpickle",
    "eval": "runs text",
    "exec": "runs text",
    "os.system": "a shell",
    "os.popen": "a shell",
    "yaml.load": "makes any object",
    "yaml.unsafe_load": "makes any object",
    "tempfile.mktemp": "a name that another process may take",
}
KEYWORDS = {"shell": "a shell", "trust_remote_code": "runs what a download says", "allow_pickle": "unpickles"}


def sources() -> list[Path]:
    return [*ROOT.glob("miles_dmd2/**/*.py"), *ROOT.glob("recipes/**/*.py"), *ROOT.glob("scripts/*.py"),
            ROOT / "train_diffusion.py"]  # fmt: skip


def dangers(source: str, *, may_pickle: bool = False) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.partition(".")[0] in UNPICKLERS and not (may_pickle and name == "pickle"):
                    yield f"line {node.lineno}: imports {name}"
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS:
                yield f"line {node.lineno}: {name} ({CALLS[name]})"
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in KEYWORDS and not off:
                    yield f"line {node.lineno}: {keyword.arg} ({KEYWORDS[keyword.arg]})"


def test_nothing_is_unpickled_and_no_shell_is_started() -> None:
    files = sources()
    assert len(files) > 50, "found hardly any source: is the test looking in the right place?"
    names = {file: str(file.relative_to(ROOT)) for file in files}
    found = [
        f"{name}: {text}"
        for file, name in names.items()
        for text in dangers(file.read_text(), may_pickle=name == PICKLES_FOR_SGLANG)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "def late():\n    import marshal",
        "pickle.loads(data)",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "yaml.load(text, Loader)",
        "AutoModel.from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_what_is_dangerous_is_found(source: str) -> None:
    assert list(dangers(source))


@pytest.mark.parametrize("source", ["load(path)", "safe_open(p)", "run(words, shell=False)", "model.eval()"])
def test_what_is_not_is_not(source: str) -> None:
    assert not list(dangers(source))


@pytest.mark.parametrize("prompt", ["../../outside", "/etc/passwd", "a/b\\c", "..", "con\n\x1b[2J", "\u202egnp.exe"])
def test_a_prompt_decides_no_more_of_a_file_than_letters_digits_and_dashes(tmp_path: Path, prompt: str) -> None:
    media = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    x = torch.zeros(1, 1)
    sample = RolloutSample(0, prompt, 0, 0, torch.tensor([1.0, 0.0]), x, x, {}, WeightVersion(0), media=media)
    directory = tmp_path / "run" / "eval"
    assert save_eval_media([sample], directory, 3, "raw") == directory / "eval_000003_raw.png"
    media_of_evals = EvalMedia(KeptMedia(directory, 8.0))
    media_of_evals.keep([sample], 3, "raw")
    assert media_of_evals.finish() == []
    found = {path.relative_to(directory) for path in tmp_path.rglob("*") if path.is_file()}
    (picture,) = found - {Path("eval_000003_raw.png"), Path("eval_000003/index.jsonl")}
    assert picture.parent == Path("eval_000003")
    assert re.fullmatch(r"[a-z0-9-]*_?[0-9a-f]{16}_0_raw\.png", picture.name)
