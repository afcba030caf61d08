"""What nodes of a cluster say of themselves, and what is refused before any actor starts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from miles_dmd2.cluster import preflight
from miles_dmd2.cluster.placement import place
from miles_dmd2.cluster.preflight import NodeFacts, check_nodes, node_facts, packages, shared_directories
from miles_dmd2.cluster.runtime import ray_session
from miles_dmd2.config import Config, ConfigError, parse
from miles_dmd2.config.memory import MemoryPlan, NodeMemory, Phase

GB = 10**9


def config_of(*flags: str) -> Config:
    required = ["--hf-checkpoint", "p", "--num-rollout", "1", "--prompt-data", "p", "--rollout-batch-size", "320"]
    return parse([*required, "--actor-num-nodes", "2", "--ray-address", "auto", *flags]).config


def memory() -> MemoryPlan:
    """40 GB a GPU; 100 GB of the first host, of which 6 + 8 / 2 + 3 in shared memory, and 50 of the second."""
    first = {"host copy of engines": 83 * GB, "exported weights": 6 * GB, "next exported weights": 8 * GB}
    first["weights in /dev/shm"] = 3 * GB
    phases = (Phase("critic", {"moments": 40 * GB}, first), Phase("critic", {"moments": 40 * GB}, {"loading": 50 * GB}))
    return MemoryPlan(tuple(NodeMemory(node, {}, (phase,)) for node, phase in enumerate(phases)))


def good() -> list[NodeFacts]:
    node = NodeFacts("one (10.0.0.1)", packages(), 65536, 14 * GB, 2000 * GB, 80 * GB, (), (), 10 * GB)
    return [node, replace(node, name="two (10.0.0.2)", shared_memory=2 * GB, object_store=0)]


def test_good_nodes_pass() -> None:
    check_nodes(good(), memory(), config_of())


@pytest.mark.parametrize(
    ("node", "change", "words"),
    [
        (1, {"open_files": 255}, ["node two (10.0.0.2)", "ulimit -n 255", "256 open files"]),
        (1, {"unseen": ("/runs/a",)}, ["node two", "does not see", "/runs/a", "file system that all nodes share"]),
        (1, {"packages": packages() | {"torch": "2.0"}}, ["node two", "has torch 2.0, the driver "]),
        (
            0,
            {"packages": packages() | {"torch": "2.0", "ray": "1"}},
            ["node one", "has torch 2.0, the driver", "(and other ray)"],
        ),
        (0, {"shared_memory": 12 * GB}, ["node one", "/dev/shm has 12 GB free", "need 13 GB", "--shm-size"]),
        (1, {"missing": ("/models/h3",)}, ["node two", "has no /models/h3", "on every node"]),
        (
            0,
            {"object_store": 9 * GB},
            ["node one", "object store has 9 GB", "need 10 GB", "--object-store-memory 10000000000"],
        ),
        (1, {"shared_memory": GB}, ["node two", "/dev/shm has 1 GB free", "need 1.07 GB"]),
        (1, {"device_memory": 44 * GB}, ["--gpu-memory-gb 44", "needs 40 GB", "0.4 GB more than the 39.6 GB"]),
        (1, {"host_memory": 111 * GB}, ["--host-memory-gb 111", "node 0 needs 100 GB"]),
    ],
)
def test_a_node_that_will_not_do_is_one_line(node: int, change: dict[str, object], words: list[str]) -> None:
    facts = good()
    facts[node] = replace(facts[node], **change)
    with pytest.raises(ConfigError) as caught:
        check_nodes(facts, memory(), config_of())
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_declared_memory_counts_if_it_is_less() -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-gb 44"):
        check_nodes(good(), memory(), config_of("--gpu-memory-gb", "44"))
    small = [replace(node, device_memory=44 * GB) for node in good()]
    with pytest.raises(ConfigError, match="--gpu-memory-gb 44"):
        check_nodes(small, memory(), config_of("--gpu-memory-gb", "80"))
    without = [replace(node, device_memory=None) for node in good()]
    check_nodes(without, memory(), config_of())


def test_directories_that_all_nodes_must_see() -> None:
    assert shared_directories(config_of("--run-dir", "/a/b")) == [Path("/a/b")]
    servers = ["--rollout-engine", "sglang", "--sglang-python", "p", "--sglang-weight-directory", "/c"]
    assert shared_directories(config_of("--run-dir", "/a", "--save", "/d", *servers)) == [
        Path("/a"),
        Path("/d"),
        Path("/c"),
    ]
    media = ["--eval-prompt-data", "p", "--save-eval-media-dir", "/m"]
    assert shared_directories(config_of("--run-dir", "/a", *media)) == [Path("/a"), Path("/m")]


def test_facts_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    facts = node_facts([str(tmp_path), "/nowhere"], "mark", "cpu")
    assert facts.unseen == ("/nowhere",)
    assert facts.packages == packages()
    assert set(facts.packages) == {*preflight.PACKAGES, "python", "miles_dmd2"}
    assert facts.device_memory is None
    assert facts.shared_memory == pytest.approx(shutil.disk_usage("/dev/shm").free, rel=0.1)


@pytest.mark.ray
def test_every_node_of_the_run_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workspace: Path) -> None:
    """On a real Ray of one node; the mark is gone afterwards, whatever came out."""
    required = [
        "--hf-checkpoint",
        str(workspace / "pipeline"),
        "--num-rollout",
        "1",
        "--prompt-data",
        "p",
        "--rollout-batch-size",
        "5",
    ]
    parsed = parse([*required, "--ray-address", "auto", "--run-dir", str(tmp_path / "run"), "--host-memory-gb", "900"])
    asked: list[list[NodeFacts]] = []
    monkeypatch.setattr(preflight, "check_nodes", lambda facts, *_: asked.append(facts))
    with ray_session(None, 1, "cpu"):
        placement = place(1, 1, "cpu", timeout=30)
        preflight.preflight(parsed.config, parsed.trainers, placement, timeout=60)
        placement.release()
    assert not ray.is_initialized()
    ((facts,),) = asked
    assert (facts.unseen, facts.missing) == ((), ())
    assert facts.object_store > 10**7
    assert facts.packages == packages()
    assert list((tmp_path / "run").iterdir()) == []
