"""Machine, directories, environment variables, packages."""

import os
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

from tests.bad_input.bench import Bench, Case, Table, flags


def with_file(bench: Bench, name: str) -> str:
    return str(bench.file(name, ""))


def open_files(bench: Bench) -> list[str]:
    bench.patch.setattr(resource, "getrlimit", lambda _: (100, 4096))
    return []


def full(bench: Bench, of: Path, free: int) -> list[str]:
    real = shutil.disk_usage
    bench.patch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=free) if Path(path) == of else real(path)
    )
    return []


def locked_out(bench: Bench, path: Path) -> None:
    real = os.access
    bench.patch.setattr(os, "access", lambda p, mode: Path(p) != path and real(p, mode))


def read_only(bench: Bench) -> list[str]:
    locked_out(bench, bench.path)
    return []


def no_session_root(bench: Bench) -> list[str]:
    locked_out(bench, Path("/tmp"))
    return []


def wandb(bench: Bench, installed: bool) -> list[str]:
    bench.patch.setattr("importlib.util.find_spec", lambda _: object() if installed else None)
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        bench.patch.delenv(name, raising=False)
    bench.patch.setenv("HOME", str(bench.path))
    bench.file(".netrc", "machine example.org login x password y\n")
    return ["--use-wandb"]


def another_run(bench: Bench) -> list[str]:
    bench.file("run/run.json", "{}")
    return []


def others_checkpoints(bench: Bench) -> list[str]:
    (bench.path / "kept" / "step_000004").mkdir(parents=True)
    return ["--save", str(bench.path / "kept")]


def cuda(bench: Bench) -> list[str]:
    bench.patch.setattr("torch.cuda.device_count", lambda: 0)
    return ["--device", "cuda"]


def nobody_listens(_: Bench) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["--ray-address", f"127.0.0.1:{port}"]


ENVIRONMENT: Table = {
    "cores": flags(
        "--actor-num-gpus-per-node 8 --num-steps-per-rollout 1", "--actor-num-gpus-per-node", "8", "use 2 or"
    ),
    "nodes": flags("--actor-num-nodes 2", "--actor-num-nodes", "2", "give --ray-address"),
    "no CUDA": Case(cuda, "--device", "cuda", "use --device cpu"),
    "open files": Case(open_files, "ulimit -n", "100", "use ulimit -n 65536"),
    "disk": Case(lambda b: full(b, b.path, 1000), "--save", "1e-06 GB are free", "make room, or use another disk"),
    "session disk": Case(lambda b: full(b, Path("/tmp"), 1000), "/tmp", "1e-06 GB are free", "use --ray-address"),
    "session root": Case(no_session_root, "/tmp", "is not writable", "use --ray-address"),
    "no wandb": Case(lambda b: wandb(b, False), "--use-wandb", "not installed", "pip install wandb"),
    "no login": Case(lambda b: wandb(b, True), "--use-wandb", "no login for api.wandb.ai", "run wandb login"),
    "metrics file": Case(
        lambda b: ["--eval-metrics-path", f"{b.path}/m.py:f", "--eval-prompt-data", str(b.file("e.txt", "one"))],
        "--eval-metrics-path",
        "no such file",
        "give module:function",
    ),
    "run is a file": Case(lambda b: ["--run-dir", with_file(b, "f")], "--run-dir", "is a file", "give a directory"),
    "run below a file": Case(
        lambda b: ["--run-dir", with_file(b, "f") + "/a"], "--run-dir", "cannot be made", "give a directory"
    ),
    "read-only": Case(read_only, "--run-dir", "is not writable", "give another directory"),
    "another run": Case(another_run, "--run-dir", "holds another run (run.json)", "give a new directory, or --load"),
    "others' checkpoints": Case(others_checkpoints, "--save", "(step_000004)", "give a new directory, or --load"),
    "no cluster": Case(nobody_listens, "--ray-address", "127.0.0.1:", "give host:port"),
}
