"""Look up the packages of requirements/lock.txt among the published advisories: `make audit`.

pip-audit, in an environment of its own, asks PyPI. It exits with 0 also where a mirror of the index has no advisories
and every package was skipped. So a package with old, well-known holes is asked for as well: an answer that does not
name them is none.

Exit codes: 0 nothing known; 1 an advisory without a waiver, or a waiver without an advisory; 3 not audited, or not all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from environments import Builder, SetupError, base_python, clean_environment, exclusive
from setup_env import LOCK, ROOT, VENV

CLEAN, FOUND, NOT_AUDITED = 0, 1, 3
TOOLS = ROOT / "requirements" / "audit.txt"
PLACE = VENV / "audit"
CONTROL = "django==3.2"  # CVE-2021-35042 and many more; must not be in the lock
# Advisory, by any of its ids -> why it does not reach this project, and until when. See docs/security.md.
WAIVERS: Mapping[str, str] = {}


def pins(text: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def judge(dependencies: Sequence[Mapping[str, Any]], waivers: Mapping[str, str]) -> tuple[int, list[str]]:
    """Exit code and lines of pip-audit's answer for the lock and the control."""
    name = CONTROL.partition("==")[0]
    controls = [entry for entry in dependencies if entry["name"].lower() == name]
    if not any(entry.get("vulns") for entry in controls):
        return NOT_AUDITED, [f"the advisories cannot be reached: the answer knows none of {CONTROL}, which has many"]
    found, skipped, used = [], [], set()
    for entry in dependencies:
        if entry in controls:
            continue
        if "skip_reason" in entry:
            skipped.append(f"not audited: {entry['skip_reason']}")
        for advisory in entry.get("vulns", ()):
            ids = {advisory["id"], *advisory.get("aliases", ())}
            waived = ids & waivers.keys()
            used |= waived
            if not waived:
                fixed = ", ".join(advisory.get("fix_versions", ())) or "no version"
                found.append(f"{entry['name']} {entry['version']}: {', '.join(sorted(ids))}; fixed in {fixed}")
    found += [f"waiver {waiver} has no advisory any more: remove it" for waiver in sorted(waivers.keys() - used)]
    return (FOUND if found else NOT_AUDITED if skipped else CLEAN), [*found, *skipped]


def tool(builder: Builder) -> Path:
    """pip-audit of requirements/audit.txt. SetupError."""
    program, stamp = PLACE / "bin" / "pip-audit", PLACE / "made-of.txt"
    if not stamp.is_file() or stamp.read_text() != TOOLS.read_text():
        builder.run("making .venv/audit", [base_python(VENV), "-m", "venv", "--clear", str(PLACE)])
        pip = [str(PLACE / "bin" / "python"), "-m", "pip", "install", "--no-deps"]
        builder.run("installing requirements/audit.txt", [*pip, "-r", str(TOOLS)])
        stamp.write_text(TOOLS.read_text())
    return program


def ask(program: Path, packages: Sequence[str]) -> list[Mapping[str, Any]]:
    """pip-audit's answer. SetupError: it gave none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(packages) + "\n")
        file.flush()
        options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
        words = [str(program), *options, "--requirement", file.name]
        done = subprocess.run(words, capture_output=True, text=True, env=clean_environment())
    try:
        dependencies: list[Mapping[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise SetupError(f"the advisories cannot be reached: {last}") from None
    return dependencies


def main() -> int:
    builder = Builder(PLACE, ".venv/audit", ".venv/audit/setup.log", "100 MB", ROOT, sys.stdout)
    packages = pins(LOCK.read_text())
    try:
        with exclusive(builder, TOOLS):
            answer = ask(tool(builder), [*packages, CONTROL])
    except SetupError as error:
        print(f"audit: {error}; nothing was audited", file=sys.stderr)
        return NOT_AUDITED
    code, lines = judge(answer, WAIVERS)
    for line in lines:
        print(f"audit: {line}", file=sys.stderr)
    verdict = {CLEAN: "no advisory without a waiver", FOUND: "see above", NOT_AUDITED: "NOT audited"}[code]
    print(f"audit: {len(packages)} packages of requirements/lock.txt, {len(WAIVERS)} waivers: {verdict}")
    return code


if __name__ == "__main__":
    sys.exit(main())
