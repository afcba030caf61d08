"""Split prompts into train, test and a small eval set, the same files on every machine; see docs/prompts.md.

python scripts/prepare_prompts.py --output prompts                                # from the Hugging Face hub
python scripts/prepare_prompts.py --source my_prompts.txt --num-test 100 --output prompts
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.data.pinned import FILES, MANIFEST, check_expected
from miles_dmd2.data.prompts import read_prompt_file
from miles_dmd2.data.splits import Prepared, prepare, write

REPOSITORY = "gdhe17/Self-Forcing"
FILE = "vidprom_filtered_extended.txt"  # 248,221 prompts of VidProM, extended


def main(argv: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(argv)
    try:
        prepared = _prepared(chosen)
        check_expected(prepared.hashes, chosen.expect_sha256, str(prepared.manifest["source"]["file"]))
        write(chosen.output, prepared, replace=chosen.replace)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --output {show(chosen.output)}: cannot be written: {error}", file=sys.stderr)
        return 2
    print(summary(prepared))
    return 0


def _prepared(chosen: argparse.Namespace) -> Prepared:
    if chosen.source is None:
        path, origin = _download(chosen.hub_repository, chosen.hub_type, chosen.hub_file, chosen.hub_revision)
        flag = "--hub-file"
    else:
        path, origin, flag = chosen.source, {"file": chosen.source.name}, "--source"
    source = read_prompt_file(path, flag, leave_out_unfit=True)
    found = len(source.prompts) + source.unfit
    if chosen.expect_prompts not in (None, found):
        raise ConfigError(
            f"--expect-prompts {chosen.expect_prompts}: {origin['file']} has {found}; it is another file than the one "
            "meant, or cut off"
        )
    return prepare(source, origin, num_test=chosen.num_test, num_eval=chosen.num_eval, seed=chosen.seed)


def _download(repository: str, kind: str, file: str, revision: str | None) -> tuple[Path, dict[str, str]]:
    """The file in the hub's own cache, and where it is from, its commit included."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        path = Path(hf_hub_download(repository, file, repo_type=kind, revision=revision))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ConfigError(
            f"--hub-repository {show(repository)}: {file} cannot be fetched ({_first_line(error)}); fetch it where "
            "there is a network, and give --source PATH"
        ) from error
    commit = re.search(r"/snapshots/([^/]+)/", path.as_posix())  # the cache's own layout
    origin = {"file": file, "repository": f"{kind}s/{repository}"}
    return path, origin if commit is None else {**origin, "revision": commit[1]}


def summary(prepared: Prepared) -> str:
    counts, source = prepared.manifest["counts"], prepared.manifest["source"]
    origin = " ".join(source[name] for name in ("repository", "revision") if name in source)
    lines = [
        f"source      {source['file']}{f' of {origin}' if origin else ''}: {counts['prompts']} prompts in "
        f"{counts['lines']} lines, SHA-256 {source['sha256']}",
        f"lines       {counts['blank_lines']} blank, {counts['carriage_returns']} ended in CR LF or CR, "
        f"{'a' if counts['byte_order_mark'] else 'no'} byte-order mark",
        f"left out    {counts['duplicates']} duplicates, {counts['unfit']} with control characters, too long or unseen",
        f"kept        {counts['kept']}: {counts['not_nfc']} brought to NFC, {counts['invisible']} with invisible "
        "characters",
        f"split       by a hash with seed {prepared.manifest['seed']}; hashes are in {MANIFEST}",
    ]
    files: Mapping[str, Mapping[str, object]] = prepared.manifest["files"]
    return "\n".join(
        [*lines, *(f"  {name:<18} {file['prompts']:>7} prompts  {file['sha256']}" for name, file in files.items())]
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class _Hashes(argparse.Action):
    """NAME=SHA256 words as a mapping."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        assert values is not None
        found = {}
        for word in map(str, values):
            name, _, digest = word.partition("=")
            if name not in FILES or not re.fullmatch(r"[0-9a-fA-F]{64}", digest) or name in found:
                wanted = ", ".join(f"{name}=SHA256" for name in FILES)
                parser.error(f"argument {option_string}: {word!r}: give {wanted}, each once, with 64 hex digits")
            found[name] = digest
        setattr(namespace, self.dest, found)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--source", type=Path, help="text (one prompt per line) or jsonl; default: the file below, from the hub")
    add("--hub-repository", default=REPOSITORY, help="default: %(default)s")
    add("--hub-type", choices=("model", "dataset"), default="model", help="kind of repository (default: %(default)s)")
    add("--hub-file", default=FILE, help="default: %(default)s")
    add("--hub-revision", help="branch, tag or commit (default: the newest)")
    add("--output", type=Path, required=True, help=f"directory for {', '.join(FILES.values())} and {MANIFEST}")
    add("--num-test", type=_count, default=1000, help="prompts of the test file (default: %(default)s)")
    add("--num-eval", type=_count, default=26, help="prompts of eval_media (default: %(default)s)")
    add("--seed", type=_count, default=0, help="another seed is another split (default: %(default)s)")
    add("--expect-prompts", type=_count, help="refuse a source with another number of prompts, doubles counted")
    add(
        "--expect-sha256",
        nargs="+",
        action=_Hashes,
        default={},
        metavar="NAME=SHA256",
        help="refuse, before anything is written, when train, test or eval_media has another content",
    )
    add("--replace", action="store_true", help="write other files of this script anew; files of others stay")
    return parser


if __name__ == "__main__":
    sys.exit(main())
