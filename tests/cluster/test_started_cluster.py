"""What `--ray-address auto` is, and that it is nobody else's cluster."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from miles_dmd2.cluster.runtime import ray_session
from miles_dmd2.config import ConfigError


@pytest.fixture(autouse=True)
def _no_cluster_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_without_one_that_ray_start_made_the_remedy_is_named() -> None:
    """Also while other runs on this host have Ray processes of their own."""
    said = "--ray-address auto: no cluster was started on this host; say `ray start"
    with pytest.raises(ConfigError, match=said), ray_session("auto", 1, "cpu", 1.0):
        pytest.fail("joined a cluster")


@pytest.mark.parametrize("by", ["file", "variable"])
def test_one_that_is_gone_is_noticed_at_once(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    if by == "file":
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    said = f"--ray-address {address}: no answer there"
    with pytest.raises(ConfigError, match=said), ray_session("auto", 1, "cpu", 1.0):
        pytest.fail("joined a cluster")
