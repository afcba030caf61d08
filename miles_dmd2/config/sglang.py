"""Options of the SGLang engine, and which of the server's own flags may be passed on to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from miles_dmd2.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - weights pass through private directories in it


@dataclass(frozen=True, slots=True)
class PassedOn:
    """Marks the field that collects another program's flags: every `<prefix>NAME` that is no flag of ours."""

    prefix: str


# Flags of SGLang's server that the run sets itself, or that would break a rollout, and why.
_RESERVED: tuple[tuple[str, str], ...] = (
    (r"host|port|scheduler-port|master-port|strict-ports", "the run chooses where its servers listen"),
    (
        r"model-(path|id|subfolder|variant)|revision|component-(weights-)?paths\..*|pipeline.*|backend|mode|config",
        "--hf-checkpoint says what is served, by SGLang's own pipeline",
    ),
    (r"sleep-on-idle", "it is always on"),
    (r".*precisions?(\..*)?", "--forward-dtype sets it"),
    (r"batching-.*", "a batched reply loses what a rollout needs"),
    (r"lora-.*", "the engine serves the student's full weights"),
    (r"(component-)?quantization.*|kv-cache-quant.*", "the engine must serve the student's weights as they are"),
    (
        r"num-gpus|gpu-ids|base-gpu-id|nnodes|node-rank|dist-init-addr|dp|use-fsdp-inference|disagg-.*|.*-urls?"
        r"|((tp|dp)|data-parallel|cfg-parallel)-size|enable-cfg-parallel|(sp|ulysses|ring|kv-gather)-degree"
        r"|hsdp-.*-dim|(encoder|denoiser|decoder)-(tp|sp|ulysses|ring|parallel)",
        "a server has one device; --rollout-num-engines starts more servers",
    ),
    (r"flow-shift|scheduler-class-override|dmd-denoising-steps", "each request carries the student's own sigmas"),
    (r"cache-dit-.*", "it skips forwards of the student"),
    (
        r"(dit-)?layerwise-.*|dit-offload-.*|.*cpu-offload.*|component-residency|performance-mode|direct-gpu-.*",
        "offloaded layers can be neither updated nor put to sleep",
    ),
    (r"trust-remote-code", "no code of a checkpoint is run"),
    (r"webui.*", "it opens another port"),
)
_NAME = re.compile(r"[a-z][a-z0-9-]*(\.[a-z0-9_]+)?")


class SGLangSection(Section):
    """The SGLang engine."""

    title: ClassVar[str] = "SGLang engine (with --rollout-engine sglang)"

    sglang_python: Path | None = Field(
        None, description="Python of the environment that SGLang is installed in; servers are started with it"
    )
    rollout_engine_url: tuple[str, ...] = Field(
        (), description="servers that run already, http://HOST:PORT each, instead of starting some (default: none)"
    )
    require_engine_plugin: bool = Field(
        False, description="refuse a server without this project's plugin instead of cutting its full rollouts"
    )
    sglang_allow_untested_version: bool = Field(
        False, description="go on with an SGLang version that this project was not tested with"
    )
    sglang_weight_sync: Literal["disk", "tensor"] = Field(
        "disk",
        description="how weights reach the servers: as files, or in requests (by CUDA IPC on the client's GPU)",
    )
    sglang_weight_directory: Path | None = Field(
        None, description="where weight files pass through; all servers must see it (default: /dev/shm if it has room)"
    )
    verify_weights_every: PositiveInt = Field(
        1, description="check the served weights after every so many syncs; the first is always checked"
    )
    probe_tolerance: PositiveFloat | None = Field(
        None,
        description="greatest difference of the probe's velocity between trainer and server, relative to its greatest "
        "value (default: 1e-4 in fp32, 0.05 in bf16)",
    )
    engine_request_timeout: PositiveFloat = Field(600.0, description="seconds for one request of a sample")
    engine_attempts: PositiveInt = Field(3, description="tries of a request, with the same seed, on any server")
    engine_max_in_flight: PositiveInt = Field(2, description="requests that wait at one server at a time")
    engine_max_restarts: NonNegativeInt = Field(3, description="restarts of one server in the whole run")
    sglang_args: Annotated[tuple[str, ...], PassedOn("--sglang-")] = Field(
        (),
        description="any other flag of SGLang's server; in YAML sglang-args: {attention-backend: torch_sdpa} "
        "(default: none)",
    )

    @field_validator("rollout_engine_url")
    @classmethod
    def _well_formed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        urls = tuple(_url(text) for text in value)
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"{twice[0]} is given twice; name each server once")
        return urls

    @field_validator("sglang_args", mode="before")
    @classmethod
    def _as_words(cls, value: object) -> object:
        return words_of(value)


def check_local(section: SGLangSection) -> None:
    """ValueError, naming the flag: an option of SGLang beside the local engine."""
    for flag in _given(section):
        raise ValueError(
            f"{flag}: is an option of the SGLang engine, and --rollout-engine is local; leave it out, or use "
            "--rollout-engine sglang"
        )


def check_sglang(section: SGLangSection, *, engines: int | None, batch_size_given: bool, nodes: int) -> None:
    """ValueError, naming the flag, for what SGLang's servers cannot do together.

    engines: --rollout-num-engines as given. nodes: of the run.
    """
    urls = section.rollout_engine_url
    if batch_size_given:
        raise ValueError(
            "--rollout-engine-batch-size: is of the local engine, SGLang's server takes one sample at a time; leave it "
            "out (--engine-max-in-flight says how many may wait)"
        )
    if not urls and section.sglang_python is None:
        raise ValueError(
            "--sglang-python is required with --rollout-engine sglang: the Python of the environment that SGLang is "
            "installed in; or give --rollout-engine-url of servers that run already"
        )
    for flag in _given(section, "sglang_python", "sglang_args", "engine_max_restarts") if urls else ():
        raise ValueError(f"{flag}: says how servers are started, and --rollout-engine-url names running ones; drop one")
    if urls and engines not in (None, len(urls)):
        raise ValueError(
            f"--rollout-num-engines {engines}: --rollout-engine-url names {len(urls)} servers; use {len(urls)}, or "
            "leave it out"
        )
    directory = section.sglang_weight_directory
    if section.sglang_weight_sync == "tensor":
        if directory is not None:
            raise ValueError(
                f"--sglang-weight-directory {directory}: no files are written with --sglang-weight-sync tensor; leave "
                "it out"
            )
        return
    elsewhere = [url for url in urls if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1")]
    why = f"--actor-num-nodes {nodes}" if nodes > 1 else f"--rollout-engine-url {elsewhere[0]}" if elsewhere else None
    if why and directory is None:
        raise ValueError(
            f"--sglang-weight-directory is required with {why}: a directory that every node sees under this path; or "
            "use --sglang-weight-sync tensor"
        )
    if why and directory is not None and directory.is_relative_to(SHARED_MEMORY):
        raise ValueError(
            f"--sglang-weight-directory {directory}: is the memory of one node, and with {why} others must read it; "
            "give a directory of a shared file system"
        )


def _given(section: SGLangSection, *names: str) -> list[str]:
    """Flags of the fields (default: all) that differ from their defaults, as a user types them."""
    flags = []
    for name, info in SGLangSection.model_fields.items():
        value = getattr(section, name)
        if value == info.default or (names and name not in names):
            continue
        flag = f"--{name.replace('_', '-')}"
        if name == "sglang_args":
            flag = f"--sglang-{value[0].removeprefix('--')}"
        elif not isinstance(value, bool):
            flag += f" {' '.join(value) if isinstance(value, tuple) else value}"
        flags.append(flag)
    return flags


def words_of(value: object) -> tuple[str, ...]:
    """Flags of the server as it takes them, `--NAME VALUE ...`: from a mapping name -> value, or from such words.

    true is a flag alone, a list several values. ValueError: another form, or a flag that may not be passed on.
    """
    words: list[str] = []
    for name, values in mapping_of(value).items():
        check_name(name)
        words += [f"--{name}", *values]
    return tuple(words)


def mapping_of(value: object) -> dict[str, list[str]]:
    """The same flags by name, without looking at which they are. ValueError: neither a mapping nor words."""
    if isinstance(value, Mapping):
        return {normal_name(str(name)): _values(str(name), part) for name, part in value.items()}
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(word, str) for word in value):
        raise ValueError("must be a mapping, for example {attention-backend: torch_sdpa}")
    flags: dict[str, list[str]] = {}
    for word in value:
        if word.startswith("--"):
            flags[name := normal_name(word.removeprefix("--"))] = []
        elif not flags:
            raise ValueError(f"{word!r} stands before the first --NAME")
        else:
            flags[name] += _values(name, word)
    return flags


def normal_name(name: str) -> str:
    """With dashes; behind a point stands a component, which is named with underscores."""
    head, point, component = name.partition(".")
    return f"{head.replace('_', '-')}{point}{component.replace('-', '_')}"


def check_name(name: str) -> None:
    """ValueError for a flag of the server that may not be passed on, with the reason."""
    flag = f"--sglang-{name}"
    if name == "args":
        raise ValueError(f"{flag}: is a key of --config; on the command line each flag is --sglang-NAME VALUE")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{flag}: is no name of a flag; use small letters, digits and dashes")
    for pattern, why in _RESERVED:
        if re.fullmatch(pattern, name):
            raise ValueError(f"{flag}: may not be passed on, {why}; leave it out")


def _values(name: str, value: object) -> list[str]:
    if value is True:
        return []
    parts = value if isinstance(value, list | tuple) else [value]
    if not parts or not all(isinstance(part, str | int | float) for part in parts):
        raise ValueError(f"{name}: must be text, a number, true, or a list of them")
    words = [str(part).lower() if isinstance(part, bool) else str(part) for part in parts]
    for word in words:
        if not word.strip() or "\0" in word or word.startswith("--"):
            raise ValueError(f"{name}: {word!r} cannot be a value; it is empty, holds a NUL or begins with --")
    return words


def _url(text: str) -> str:
    """http://HOST:PORT, without a slash at the end."""
    wanted = "give http://HOST:PORT (or https) of a server, nothing behind the port"
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"{text!r} is no URL; {wanted}") from None
    if parts.scheme not in ("http", "https") or not host or not port:
        raise ValueError(f"{text!r} lacks http://, a host or a port; {wanted}")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"holds a user or a password, which would stand in logs; {wanted}")
    if parts.path not in ("", "/") or parts.query or parts.fragment or not text.isascii() or not text.isprintable():
        raise ValueError(f"{text!r} has more than scheme, host and port; {wanted}")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port}"
