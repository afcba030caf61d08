"""The memory plan against byte counts done by hand, on checkpoints whose headers alone are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from config_commands import run
from safetensors.torch import save_file

from miles_dmd2.config import ConfigError, build_plan, environment, plan_yaml
from miles_dmd2.config.headers import Weight, read_component, read_components
from miles_dmd2.config.memory import (
    GB,
    Limits,
    MemoryPlan,
    build_memory,
    check_memory,
    render_memory,
    served_bytes,
    shard_values,
    unit_values,
)

# 10 rows of 3 and 4 values outside of blocks; blocks of 24 + 2 and of 40 values: 100 in all.
TRANSFORMER = {
    "proj_in.weight": (10, 3),
    "norm.bias": (4,),
    "blocks.0.attn.weight": (6, 4),
    "blocks.0.attn.bias": (2,),
    "blocks.1.attn.weight": (4, 10),
}
TEXT_ENCODER, VAE = {"embed": (7, 8)}, {"decoder": (5,), "counter": (3,)}
VALUES, LARGEST, ROOT = 100, 40, 34
TWO_RANKS = 5 * 3 + 2 + 3 * 4 + 1 + 2 * 10  # the first half of each tensor's rows
FOUR_RANKS = 3 * 3 + 1 + 2 * 4 + 1 + 1 * 10  # ceil(rows / 4) of each
ENGINE = VALUES + 56 + 5  # floating point values; the counter is int64


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    root = tmp_path / "teacher"
    for name, shapes in (("transformer", TRANSFORMER), ("text_encoder", TEXT_ENCODER), ("vae", VAE)):
        (root / name).mkdir(parents=True)
        tensors = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
        if "counter" in tensors:
            tensors["counter"] = torch.zeros(3, dtype=torch.int64)
        save_file(tensors, root / name / "model.safetensors")
    (root / "tokenizer").mkdir()
    parts = ("transformer", "text_encoder", "vae", "tokenizer", "absent")
    (root / "model_index.json").write_text(json.dumps({name: ["some", "Class"] for name in parts} | {"_x": 1}))
    return root


@pytest.fixture
def planned(checkpoint: Path) -> Callable[..., MemoryPlan]:
    def of(flags: str = "") -> MemoryPlan:
        parsed = run("--rollout-batch-size", "320", "--micro-batch-size", "1", *flags.split())
        return build_memory(parsed.config, parsed.trainers, read_components(checkpoint))

    return of


def test_headers(checkpoint: Path) -> None:
    components = read_components(checkpoint)
    assert {name: len(weights) for name, weights in components.items()} == {
        "transformer": 5,
        "text_encoder": 1,
        "vae": 2,
    }
    assert Weight("proj_in.weight", "BF16", (10, 3), 60) in components["transformer"]
    assert served_bytes("vae", components["vae"], "fp32") == 5 * 4 + 3 * 8
    assert served_bytes("vae", components["vae"], "bf16") == 5 * 2 + 3 * 8


def test_an_index_says_which_files_count_and_a_variant_counts_once(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "x-2.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path / "x.fp16.safetensors")
    assert sum(weight.values for weight in read_component(tmp_path)) == 5
    save_file({"old": torch.zeros(9)}, tmp_path / "old.safetensors")
    names = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps(names))
    assert {weight.name for weight in read_component(tmp_path)} == {"a", "b"}


def test_weights_in_a_subfolder_count(tmp_path: Path) -> None:
    """MiniMax H3 keeps its video VAE's in source/."""
    (tmp_path / "source").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "source" / "model.safetensors")
    assert [weight.nbytes for weight in read_component(tmp_path)] == [8]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\xff" * 20, "no readable safetensors header"),
        (b"\x04" + bytes(7) + b"nope", "no readable safetensors header"),
        (b"\x02" + bytes(7) + b"[]", "no readable safetensors header"),
        (b"\x08" + bytes(7) + b'{"w": 1}', "describes w in a malformed way"),
    ],
)
def test_a_malformed_header_is_one_line(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=what) as caught:
        read_component(tmp_path)
    assert "w.safetensors" in str(caught.value)


def test_shards_and_units(checkpoint: Path) -> None:
    weights = read_components(checkpoint)["transformer"]
    assert [shard_values(weights, ranks) for ranks in (1, 2, 4)] == [VALUES, TWO_RANKS, FOUR_RANKS]
    assert unit_values(weights) == (LARGEST, ROOT)
    assert shard_values([Weight("scalar", "F32", (), 4)], 8) == 1


def test_one_plain_rank_on_a_gpu(planned: Callable[..., MemoryPlan]) -> None:
    (node,) = planned("--device cuda").nodes
    assert node.runs == {"engines": (0, 0), "critic": (0, 0), "actor": (0, 0)}
    phases = {phase.name: phase for phase in node.phases}
    assert list(phases) == ["start of critic", "start of actor", "generate", "critic", "actor"]
    assert phases["generate"].device == {
        "engine text_encoder": 56 * 4,
        "engine transformer": 400,
        "engine vae": 5 * 4 + 24,
    }
    assert phases["critic"].device == {"master weights": 400, "moments": 800, "teacher": 400, "gradients": 400}
    assert phases["actor"].device == {"master weights": 400, "moments": 800, "gradients": 400}
    asleep = {"host copy of critic": 1600, "host copy of actor": 1200, "host copy of engines": ENGINE * 4 + 24}
    assert phases["start of critic"].host == asleep | {"loading": 2 * 400}
    assert phases["start of actor"].host == asleep | {"loading": 400}
    assert phases["generate"].host == asleep | {"exported weights": 400, "weights received": 400}
    assert phases["critic"].host == asleep | {"exported weights": 400}
    assert phases["actor"].host == asleep | {"exported weights": 400, "next exported weights": 2 * 400}


def test_two_nodes_with_servers_in_bf16(planned: Callable[..., MemoryPlan], tmp_path: Path) -> None:
    """Four ranks on two nodes, three servers: two on the first node. Weights go over a shared file system."""
    flags = (
        "--device cuda --actor-num-nodes 2 --actor-num-gpus-per-node 2 --forward-dtype bf16 --rollout-engine sglang "
        f"--sglang-python p --rollout-num-engines 3 --student-ema-decay 0.9 --sglang-weight-directory {tmp_path}"
    )
    first, second = planned(flags).nodes
    assert first.runs == {"engines": (0, 1), "critic": (0, 1), "actor": (0, 1)}
    assert second.runs == {"engines": (2, 2), "critic": (2, 3), "actor": (2, 3)}
    shard = FOUR_RANKS * 4
    on_first = {phase.name: phase for phase in first.phases}
    assert on_first["critic"].device == {
        "master weights": shard,
        "moments": 2 * shard,
        "teacher": shard,
        "gradients": shard,
        "gathered weights": (ROOT + 2 * LARGEST) * 2,
        "gathered gradients": LARGEST * (2 + 4),
    }
    assert on_first["actor"].device["average"] == shard
    asleep = {"host copy of critic": 2 * 4 * shard, "host copy of actor": 2 * 4 * shard}
    engine = ENGINE * 2 + 24
    received = {"weights received": 400 + 200}
    assert on_first["generate"].host == asleep | {
        "host copy of engines": 2 * engine,
        "exported weights": 2 * 400,  # raw and averaged
        **received,
    }
    assert on_first["actor"].host["next exported weights"] == 2 * 2 * 400
    on_second = {phase.name: phase for phase in second.phases}
    assert on_second["generate"].host == asleep | {"host copy of engines": engine}
    assert on_second["actor"].host == on_second["generate"].host


@pytest.mark.parametrize(
    ("flags", "held"),
    [
        ("", {"weights in /dev/shm": (400, 800)}),
        ("--sglang-weight-sync tensor", {"weights in the client": (400, 800)}),
        ("--sglang-weight-directory /shared/weights", {}),
    ],
)
def test_what_servers_read_the_weights_from(
    planned: Callable[..., MemoryPlan], flags: str, held: dict[str, tuple[int, int]]
) -> None:
    (node,) = planned(f"--device cuda --rollout-engine sglang --sglang-python p {flags}").nodes
    phases = {phase.name: phase.host for phase in node.phases}
    for name in ("weights in /dev/shm", "weights in the client"):
        while_training, while_syncing = held.get(name, (None, None))
        assert (phases["critic"].get(name), phases["generate"].get(name)) == (while_training, while_syncing)


def test_on_a_cpu_the_host_holds_the_devices_too(planned: Callable[..., MemoryPlan]) -> None:
    (node,) = planned("--actor-num-gpus-per-node 2").nodes
    host = {phase.name: phase.host for phase in node.phases}
    assert host["critic"]["awake: master weights"] == 2 * TWO_RANKS * 4
    assert host["generate"]["awake: engine transformer"] == 400
    assert "awake: engine transformer" not in host["critic"]
    (node,) = planned("--rollout-engine sglang --sglang-python p").nodes
    host = {phase.name: phase.host for phase in node.phases}
    assert "host copy of engines" not in host["generate"]  # a server on a CPU keeps its weights where they are
    assert host["critic"]["host copy of engines"] == ENGINE * 4 + 24


def test_servers_of_others_are_not_counted(planned: Callable[..., MemoryPlan]) -> None:
    (node,) = planned("--device cuda --rollout-engine sglang --rollout-engine-url http://127.0.0.1:1").nodes
    assert list(node.runs) == ["critic", "actor"]
    phases = {phase.name: phase for phase in node.phases}
    assert phases["generate"].device == {}
    assert "host copy of engines" not in phases["critic"].host


@pytest.mark.parametrize(("at_once", "loading"), [("1", 800), ("2", 1600), ("9", 3200)])
def test_ranks_that_load_one_after_the_other(planned: Callable[..., MemoryPlan], at_once: str, loading: int) -> None:
    (node,) = planned(f"--device cuda --actor-num-gpus-per-node 4 --load-ranks-at-once {at_once}").nodes
    assert node.phases[0].host["loading"] == loading


@pytest.mark.parametrize(
    ("flags", "limits", "words"),
    [
        (
            "",
            Limits(device=1999),
            ["--gpu-memory-gb 1.999e-06", "a GPU of node 0", "phase critic", "2e-06 GB", "moments", "more ranks"],
        ),
        ("--num-steps-per-rollout 5", Limits(host=4000), ["--host-memory-gb 4e-06", "the host of node 0", "actor"]),
        (
            "--actor-num-gpus-per-node 8 --rollout-num-engines 8",
            Limits(host=9000),
            ["most of it: loading", "--load-ranks-at-once"],
        ),
        (
            "--actor-num-gpus-per-node 8 --rollout-num-engines 8 --load-ranks-at-once 1",
            Limits(host=9000),
            ["most of it: host copy of engines", "fewer engines (--rollout-num-engines)"],
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    planned: Callable[..., MemoryPlan], flags: str, limits: Limits, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(planned(f"--device cuda {flags}"), limits)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_the_reserve_decides(planned: Callable[..., MemoryPlan]) -> None:
    """2000 bytes a GPU while the critic trains, and 4668 of the host while the actor does."""
    plan = planned("--device cuda")
    check_memory(plan, Limits())
    check_memory(plan, Limits(device=2000 / 0.9 + 1, host=4668 / 0.9 + 1))
    with pytest.raises(ConfigError, match="--gpu-memory-gb"):
        check_memory(plan, Limits(device=2000 / 0.9 - 1))
    with pytest.raises(ConfigError, match="--host-memory-gb"):
        check_memory(plan, Limits(host=4668 / 0.9 - 1))


def test_an_engine_may_hold_components_in_other_dtypes_and_leave_some_out(checkpoint: Path) -> None:
    parsed = run("--device", "cuda", "--forward-dtype", "bf16")

    def width(component: str, name: str, dtype: str) -> int:
        return {"transformer": 2, "text_encoder": 0, "vae": 4}[component]

    (node,) = build_memory(parsed.config, parsed.trainers, read_components(checkpoint), width).nodes
    (generate,) = (phase for phase in node.phases if phase.name == "generate")
    assert generate.device == {"engine text_encoder": 0, "engine transformer": 200, "engine vae": 5 * 4 + 24}


def test_without_trainers_there_are_engines_alone(checkpoint: Path) -> None:
    config = run("--device", "cuda").config
    (node,) = build_memory(config, (), read_components(checkpoint)).nodes
    assert node.runs == {"engines": (0, 0)}
    (phase,) = node.phases
    assert (phase.name, phase.host) == ("generate", {"host copy of engines": ENGINE * 4 + 24})


def test_the_table_shows_nodes_that_are_alike_once(planned: Callable[..., MemoryPlan]) -> None:
    flags = "--device cuda --actor-num-nodes 4 --actor-num-gpus-per-node 2"
    text = render_memory(planned(flags), Limits(80 * GB, 2000 * GB))
    assert "limits 80 GB a GPU and 2000 GB a host, 10% of them kept free" in text
    assert "activations, batches, media and libraries are not counted" in text
    assert text.count("  node 0: engines 0-0, critic 0-1, actor 0-1") == 1
    assert "  node 1: critic 2-3, actor 2-3" in text
    assert "no limit known" in render_memory(planned(), Limits())


def test_the_yaml_has_every_node(checkpoint: Path, write: Callable[..., Path]) -> None:
    parsed = run("--device", "cuda")
    plan = build_plan(parsed.config, parsed.trainers)
    memory = build_memory(parsed.config, parsed.trainers, read_components(checkpoint))
    text = plan_yaml(parsed.config, plan, memory)
    (node,) = yaml.safe_load(text)["plan"]["nodes"]
    assert node["runs"] == {"engines": "0-0", "critic": "0-0", "actor": "0-0"}
    assert node["gb-of-its-fullest-gpu"]["critic"]["total"] == 0.0
    assert run("--config", str(write(text))).config == parsed.config


@pytest.mark.parametrize(("content", "expected"), [("12345\n", 12345), ("max\n", None), (None, None), ("9" * 30, None)])
def test_a_container_s_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, expected: int | None
) -> None:
    file = tmp_path / "memory.max"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(environment, "_CGROUP_LIMIT", file)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert environment.host_bytes() == (expected or installed)
