"""Options of the SGLang engine: what goes together, what is passed on to the server, what may change on resume."""

from collections.abc import Callable
from pathlib import Path

import pytest
from config_commands import command, complaint, run

from miles_dmd2.config import build_plan, flatten, parse, plan_yaml, render_plan
from miles_dmd2.config.resume import changes

Write = Callable[..., Path]
STARTED = ("--rollout-engine", "sglang", "--sglang-python", "engine/bin/python")
RUNNING = ("--rollout-engine", "sglang", "--rollout-engine-url", "http://127.0.0.1:30000")


def passed_on(*flags: str) -> tuple[str, ...]:
    return run(*STARTED, *flags).config.sglang.sglang_args


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", ""),
        ("--sglang-attention-backend torch_sdpa", "--attention-backend torch_sdpa"),
        ("--sglang-attention-backend=torch_sdpa", "--attention-backend torch_sdpa"),
        ("--sglang-attention_backend torch_sdpa", "--attention-backend torch_sdpa"),
        ("--sglang-enable-torch-compile", "--enable-torch-compile"),
        ("--sglang-enable-torch-compile --lr 1", "--enable-torch-compile"),
        ("--sglang-enable-torch-compile --sglang-log-level info", "--enable-torch-compile --log-level info"),
        ("--lr 1 --sglang-warmup-resolutions 64x64 32x32 --seed 3", "--warmup-resolutions 64x64 32x32"),
        ("--sglang-dist-timeout -1", "--dist-timeout -1"),
        (
            "--sglang-component-attention-backends.text-encoder torch_sdpa",
            "--component-attention-backends.text_encoder torch_sdpa",
        ),
    ],
)
def test_flags_that_are_not_ours_are_passed_on_word_by_word(typed: str, words: str) -> None:
    assert passed_on(*typed.split()) == tuple(words.split())


def test_in_yaml_they_are_a_mapping_and_flags_win_name_by_name(write: Write) -> None:
    file = write(
        "sglang-args: {attention_backend: fa, enable-torch-compile: true, disable-autocast: false, warmup-steps: 2, "
        "warmup-resolutions: [a, b]}\n"
    )
    config = ("--config", str(file))
    others = ("--enable-torch-compile", "--disable-autocast", "false", "--warmup-steps", "2")
    assert passed_on(*config) == ("--attention-backend", "fa", *others, "--warmup-resolutions", "a", "b")
    flags = (
        "--sglang-attention-backend",
        "torch_sdpa",
        "--sglang-warmup-resolutions",
        "c",
        "--sglang-log-level",
        "info",
    )
    expected = ("--attention-backend", "torch_sdpa", *others, "--warmup-resolutions", "c", "--log-level", "info")
    assert passed_on(*config, *flags) == expected


def test_what_dry_run_prints_gives_the_same_flags_and_takes_more(write: Write) -> None:
    parsed = run(*STARTED, "--sglang-attention-backend", "fa", "--sglang-enable-torch-compile")
    text = plan_yaml(parsed.config, build_plan(parsed.config, parsed.trainers))
    file = write(text)
    assert parse(["--config", str(file)]).config == parsed.config
    more = parse(["--config", str(file), "--sglang-attention-backend", "torch_sdpa"]).config.sglang.sglang_args
    assert more == ("--attention-backend", "torch_sdpa", "--enable-torch-compile")


SET_BY_THE_RUN = {
    "host": "where its servers listen",
    "port": "where its servers listen",
    "scheduler-port": "where its servers listen",
    "master-port": "where its servers listen",
    "strict-ports": "where its servers listen",
    "model-path": "--hf-checkpoint",
    "model-id": "--hf-checkpoint",
    "component-paths.vae": "--hf-checkpoint",
    "backend": "--hf-checkpoint",
    "config": "--hf-checkpoint",
    "pipeline-class-name": "--hf-checkpoint",
    "sleep-on-idle": "always on",
    "dit-precision": "--forward-dtype",
    "vae-decode-precision": "--forward-dtype",
    "text-encoder-precisions": "--forward-dtype",
    "component-precisions.vae": "--forward-dtype",
    "batching-max-size": "batched reply",
    "batching-config": "batched reply",
    "lora-path": "full weights",
    "quantization": "weights as they are",
    "component-quantizations.transformer": "weights as they are",
    "num-gpus": "--rollout-num-engines",
    "tp-size": "--rollout-num-engines",
    "dp-size": "--rollout-num-engines",
    "data-parallel-size": "--rollout-num-engines",
    "ulysses-degree": "--rollout-num-engines",
    "cfg-parallel-size": "--rollout-num-engines",
    "disagg-role": "--rollout-num-engines",
    "srt-encoder-url": "--rollout-num-engines",
    "flow-shift": "own sigmas",
    "cache-dit-config": "skips forwards",
}


@pytest.mark.parametrize("name", SET_BY_THE_RUN)
def test_what_the_run_sets_itself_or_would_break_a_rollout_is_refused_with_the_reason(write: Write, name: str) -> None:
    for text in (
        complaint(command(*STARTED, f"--sglang-{name}", "1")),
        complaint(command(*STARTED, f"--sglang-{name.replace('-', '_')}=1")),
        complaint(command(*STARTED, "--config", str(write(f"sglang-args: {{{name}: 1}}\n")))),
    ):
        assert f"--sglang-{name}: may not be passed on, " in text
        assert SET_BY_THE_RUN[name] in text
        assert "leave it out" in text


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--sglang-pyton", "--sglang-python"),
        ("--sglang-weight_sync", "--sglang-weight-sync"),
        ("--sglang-weights-directory", "--sglang-weight-directory"),
        ("--sglang-allow-untested", "--sglang-allow-untested-version"),
    ],
)
def test_a_misspelt_flag_of_ours_is_not_passed_on(flag: str, meant: str) -> None:
    assert complaint(command(*STARTED, flag, "x")) == f"{flag}: no such flag; the nearest is {meant}"


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--sglang-args x", ("--sglang-args", "--config", "--sglang-NAME VALUE")),
        ("--sglang-NAME x", ("--sglang-NAME", "no name of a flag")),
        ("--sglang- x", ("--sglang-:", "no name of a flag")),
        ("--sglang-a..b x", ("no name of a flag",)),
        ("--sglang-log-level a --sglang-log-level b", ("--sglang-log-level", "given twice")),
        ("--sglang-log-level=", ("log-level", "empty")),
    ],
)
def test_flags_that_cannot_be_passed_on(flags: str, parts: tuple[str, ...]) -> None:
    text = complaint(command(*STARTED, *flags.split()))
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("3", "must be a mapping"),
        ("text", "must be a mapping"),
        ("[a]", "before the first --NAME"),
        ("[3]", "must be a mapping"),
        ("{log-level: null}", "log-level: must be text, a number"),
        ("{log-level: {a: b}}", "log-level: must be text, a number"),
        ("{log-level: ''}", "log-level: '' cannot be a value"),
        ("{log-level: --port}", "log-level: '--port' cannot be a value"),
        ("{log-level: []}", "log-level: must be text, a number"),
    ],
)
def test_yaml_that_is_no_set_of_flags(write: Write, value: str, part: str) -> None:
    text = complaint(command(*STARTED, "--config", str(write(f"seed: 1\nsglang-args: {value}\n"))))
    assert text.startswith("--sglang-args ")
    assert ".yaml:2)" in text
    assert part in text, text


def test_every_option_of_sglang_is_refused_beside_the_local_engine() -> None:
    given = {
        "--sglang-python p": "--sglang-python p",
        "--rollout-engine-url http://a:1": "--rollout-engine-url http://a:1",
        "--require-engine-plugin": "--require-engine-plugin",
        "--sglang-allow-untested-version": "--sglang-allow-untested-version",
        "--sglang-weight-sync tensor": "--sglang-weight-sync tensor",
        "--sglang-weight-directory d": "--sglang-weight-directory d",
        "--verify-weights-every 2": "--verify-weights-every 2",
        "--probe-tolerance 0.5": "--probe-tolerance 0.5",
        "--engine-request-timeout 3": "--engine-request-timeout 3.0",
        "--engine-attempts 1": "--engine-attempts 1",
        "--engine-max-in-flight 1": "--engine-max-in-flight 1",
        "--engine-max-restarts 0": "--engine-max-restarts 0",
        "--sglang-log-level info": "--sglang-log-level",
    }
    from miles_dmd2.config.sglang import SGLangSection

    assert len(given) == len(SGLangSection.model_fields)
    for flags, named in given.items():
        text = complaint(command(*flags.split()))
        assert text.startswith(f"{named}: is an option of the SGLang engine"), text
        assert "--rollout-engine sglang" in text


TOGETHER: list[tuple[str, tuple[str, ...]]] = [
    ("--rollout-engine sglang", ("--sglang-python is required", "--rollout-engine-url")),
    ("--rollout-engine vllm", ("--rollout-engine vllm", "local, sglang")),
    (" ".join((*RUNNING, "--sglang-python p")), ("--sglang-python p: says how servers are started", "drop one")),
    (" ".join((*RUNNING, "--sglang-log-level info")), ("--sglang-log-level: says how", "drop one")),
    (" ".join((*RUNNING, "--engine-max-restarts 5")), ("--engine-max-restarts 5: says how", "drop one")),
    (" ".join((*RUNNING, "--rollout-num-engines 2")), ("--rollout-num-engines 2", "names 1 servers", "leave it out")),
    (" ".join((*STARTED, "--rollout-num-engines 2")), ("--rollout-num-engines 2", "1 devices", "use 1 or fewer")),
    (" ".join((*STARTED, "--rollout-engine-batch-size 8")), ("--rollout-engine-batch-size", "one sample at a time")),
    (
        " ".join((*STARTED, "--sglang-weight-sync tensor --sglang-weight-directory d")),
        ("--sglang-weight-directory d", "no files", "leave it out"),
    ),
    (
        " ".join((*STARTED, "--actor-num-nodes 2")),
        ("--sglang-weight-directory is required with --actor-num-nodes 2", "every node", "tensor"),
    ),
    (
        " ".join((*STARTED, "--actor-num-nodes 2 --sglang-weight-directory /dev/shm/w")),
        ("--sglang-weight-directory /dev/shm/w", "one node", "shared file system"),
    ),
    (
        "--rollout-engine sglang --rollout-engine-url http://10.0.0.2:30000",
        ("--sglang-weight-directory is required with --rollout-engine-url http://10.0.0.2:30000",),
    ),
    (
        "--rollout-engine sglang --rollout-engine-url http://10.0.0.2:30000 --sglang-weight-directory /dev/shm",
        ("--sglang-weight-directory /dev/shm", "shared file system"),
    ),
]


@pytest.mark.parametrize(("flags", "parts"), TOGETHER, ids=[flags for flags, _ in TOGETHER])
def test_what_does_not_go_together(flags: str, parts: tuple[str, ...]) -> None:
    text = complaint(command(*flags.split()))
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    "flags",
    [
        (*STARTED, "--actor-num-nodes", "2", "--sglang-weight-sync", "tensor"),
        (*STARTED, "--actor-num-nodes", "2", "--sglang-weight-directory", "/shared/w"),
        (*STARTED, "--sglang-weight-directory", "/dev/shm/w"),
        (*STARTED, "--diffusion-sigmas", "0.9,0.5", "--dmd2-stop-step", "round_robin"),
        (*STARTED, "--dmd2-teacher-guidance-scale", "3", "--dmd2-student-sample-type", "ode"),
        (*RUNNING, "http://localhost:30010", "http://[::1]:30020", "--rollout-num-engines", "3"),
        ("--rollout-engine", "sglang", "--rollout-engine-url", "https://far:1", "--sglang-weight-directory", "/shared"),
    ],
)
def test_what_goes_together(flags: tuple[str, ...]) -> None:
    run(*flags)


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("127.0.0.1:30000", "lacks http://, a host or a port"),
        ("http://127.0.0.1", "lacks http://, a host or a port"),
        ("http://:30000", "lacks http://, a host or a port"),
        ("ftp://a:1", "lacks http://, a host or a port"),
        ("http://a:0", "lacks http://, a host or a port"),
        ("http://a:99999", "is no URL"),
        ("http://[a:1", "is no URL"),
        ("http://a:1/v1", "more than scheme, host and port"),
        ("http://a:1?x=1", "more than scheme, host and port"),
        ("http://me:secret@a:1", "user or a password"),
        ("http://a:1 http://a:1/", "http://a:1 is given twice"),
    ],
)
def test_urls_that_are_none(url: str, part: str) -> None:
    text = complaint(command("--rollout-engine", "sglang", "--rollout-engine-url", *url.split()))
    assert text.startswith("--rollout-engine-url ")
    assert part in text, text


def test_derived_defaults() -> None:
    local, started = run().config, run(*STARTED).config
    running = run(*RUNNING, "http://127.0.0.1:30010").config
    assert [c.rollout.rollout_num_engines for c in (local, started, running)] == [1, 1, 2]
    assert [c.cluster.start_timeout for c in (local, started, running)] == [180, 600, 600]
    assert run(*STARTED, "--start-timeout", "5").config.start_timeout == 5
    assert [run("--forward-dtype", dtype).config.run.max_x0_drift for dtype in ("fp32", "bf16")] == [1e-3, 0.05]


def test_the_plan_says_who_generates_and_how() -> None:
    parsed = run(*STARTED, "--sglang-attention-backend", "torch_sdpa", "--verify-weights-every", "4")
    text = render_plan(build_plan(parsed.config, parsed.trainers))
    (line,) = [line for line in text.splitlines() if line.startswith("  engines")]
    assert line == (
        "  engines      1 sglang on node 0 device 0; started with engine/bin/python, up to 3 restarts each, 2 requests "
        "in flight each, 3 tries of 600 s, weights as files in /dev/shm, checked after the first and every 4 syncs, "
        "server flags --attention-backend torch_sdpa"
    )
    parsed = run(*RUNNING, "--sglang-weight-sync", "tensor")
    assert (
        "1 sglang on http://127.0.0.1:30000; 2 requests in flight each, 3 tries of 600 s, weights in requests, checked "
        "after each sync"
    ) in render_plan(build_plan(parsed.config, parsed.trainers))


def test_servers_on_several_nodes_come_with_a_warning() -> None:
    def notes(*flags: str) -> list[str]:
        parsed = run(*flags, "--actor-num-nodes", "2", "--sglang-weight-sync", "tensor", "--diffusion-num-steps", "1")
        return [note for note in build_plan(parsed.config, parsed.trainers).notes if "unpickle" in note]

    assert len(notes(*STARTED)) == 1
    assert notes(*RUNNING) == []


def test_a_resumed_run_may_have_other_servers_but_not_another_engine() -> None:
    saved = flatten(run(*STARTED).config)
    elsewhere = run(*RUNNING, "http://127.0.0.1:30010", "--max-x0-drift", "1", "--engine-attempts", "9").config
    assert changes(saved, elsewhere) == {}
    assert changes(saved, run().config) == {"rollout_engine": ("--rollout-engine was sglang and is local", True)}
    flags = run(*STARTED, "--sglang-attention-backend", "fa").config
    assert changes(saved, flags) == {"sglang_args": ("--sglang-args was [] and is --attention-backend fa", True)}
    more = run("--actor-num-gpus-per-node", "2", "--rollout-num-engines", "2").config
    found = changes(flatten(run().config), more)
    assert found["rollout_num_engines"] == ("--rollout-num-engines was 1 and is 2", True)
