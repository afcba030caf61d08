"""What is made of pip-audit's answer. The shapes are those of pip-audit 2.10.1 --format json."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit import CLEAN, CONTROL, FOUND, LOCK, NOT_AUDITED, ROOT, TOOLS, WAIVERS, ask, judge, pins
from environments import SetupError

HOLE = {"id": "PYSEC-2021-109", "fix_versions": ["3.2.5"], "aliases": ["CVE-2021-35042"], "description": "SQL"}
KNOWN = {"name": "django", "version": "3.2", "vulns": [HOLE]}
FINE = {"name": "numpy", "version": "2.4.0", "vulns": []}
BAD = {
    "name": "ray",
    "version": "2.60.0",
    "vulns": [{"id": "GHSA-a", "fix_versions": [], "aliases": ["CVE-1"], "description": ""}],
}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)"}


def test_nothing_known() -> None:
    assert judge([FINE, KNOWN], {}) == (CLEAN, [])


@pytest.mark.parametrize(
    "control",
    [
        [],
        [{"name": "django", "version": "3.2", "vulns": []}],
        [{"name": "django", "skip_reason": "Dependency not found on PyPI and could not be audited: django (3.2)"}],
    ],
)
def test_an_answer_that_does_not_know_the_control_is_none(control: list[dict[str, object]]) -> None:
    """As from a mirror that has no advisories: pip-audit says "No known vulnerabilities found" and exits with 0."""
    code, lines = judge([FINE, *control], {})
    assert code == NOT_AUDITED == 3
    assert "cannot be reached" in lines[0]


def test_an_advisory_is_told_with_its_names_and_the_remedy() -> None:
    assert judge([FINE, BAD, KNOWN], {}) == (FOUND, ["ray 2.60.0: CVE-1, GHSA-a; fixed in no version"])


@pytest.mark.parametrize("by", ["GHSA-a", "CVE-1"])
def test_a_waiver_by_any_name(by: str) -> None:
    assert judge([BAD, KNOWN], {by: "not reached"}) == (CLEAN, [])


def test_a_waiver_of_nothing_is_told() -> None:
    assert judge([FINE, KNOWN], {"CVE-1": "not reached"})[0] == FOUND


def test_a_skipped_package_is_not_audited_and_an_advisory_goes_before() -> None:
    assert judge([SKIPPED, KNOWN], {}) == (NOT_AUDITED, [f"not audited: {SKIPPED['skip_reason']}"])
    assert judge([SKIPPED, BAD, KNOWN], {})[0] == FOUND


def test_the_control_is_no_package_of_ours() -> None:
    assert CONTROL.partition("==")[0] not in {pin.partition("==")[0].lower() for pin in pins(LOCK.read_text())}


def test_every_line_of_both_files_is_a_pin() -> None:
    for file in (LOCK, TOOLS):
        assert all("==" in pin for pin in pins(file.read_text()))


def test_a_tool_that_fails_has_not_audited(tmp_path: Path) -> None:
    program = tmp_path / "pip-audit"
    program.write_text("#!/bin/sh\necho 'Failed to resolve pypi.org' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(SetupError, match=r"cannot be reached: Failed to resolve pypi\.org"):
        ask(program, ["numpy==2.4.0"])


def test_every_waiver_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert all(waiver in page and reason for waiver, reason in WAIVERS.items())
