"""An engine's environment with a stand-in for SGLang: a Python, the metadata, and a server that is this very file.

`FAKE` in its environment says how it misbehaves. It takes the ports that the real one takes, has a worker process that
follows it, and writes what it was given to the file `FAKE_RECORD`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path

MODES = ("", "slow", "crash", "deaf", "stock", "transformer falls back", "text_encoder falls back", "no plugin")
WORKER = (
    "import os, time; from miles_dmd2.engines.sglang_plugin.launch import die_with; "
    "die_with(os.getppid()); time.sleep(600)"
)


def make_engine(directory: Path, version: str | None = "0.5.23", lacking: tuple[str, ...] = ()) -> Path:
    """The Python of a virtual environment in `directory` with this file as its SGLang."""
    venv.create(directory, symlinks=True, with_pip=False)
    (packages,) = directory.glob("lib/python*/site-packages")
    for name in {"torch", "diffusers", "transformers", "sglang"} - set(lacking):
        (packages / name).mkdir()
        (packages / name / "__init__.py").touch()
    if version is not None:
        info = packages / f"sglang-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        if "multimodal_gen" not in lacking:
            runtime = packages / "sglang" / "multimodal_gen" / "runtime"
            runtime.mkdir(parents=True)
            shutil.copy(__file__, runtime / "launch_server.py")
    return directory / "bin" / "python"


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def listen(port: int) -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", port))
    taken.listen()
    return taken


class Handler(BaseHTTPRequestHandler):
    """What of the real server's HTTP side a life-cycle sees."""

    worker: subprocess.Popen[bytes]
    broker: socket.socket | None
    failed: Path

    def do_GET(self) -> None:
        if self.path == "/health" and self.worker.poll() is not None:
            self.answer(503, {"status": "unhealthy", "error": "Scheduler worker exited; restart the server."})
        elif self.path == "/health" and self.broker is None:
            self.answer(503, {"status": "unhealthy", "error": "Offline request broker exited; restart the server."})
        elif self.path == "/health" and self.failed.exists():
            self.answer(503, {"status": "unhealthy", "error": "timed out"})
        elif self.path == "/health":
            self.answer(200, {"status": "ok"})
        elif self.path == "/miles_dmd2/capabilities" and os.environ.get("FAKE") != "stock":
            launch_id = os.environ.get("MILES_DMD2_LAUNCH_ID")
            self.answer(200, {"protocol": 1, "launch_id": launch_id, "worker": {"pid": self.worker.pid}})
        else:
            self.answer(404, {"detail": "Not Found"})

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    mode = os.environ.get("FAKE", "")
    assert mode in MODES
    found = [(e.name, e.value) for e in entry_points(group="sglang.multimodal_gen.plugins")]
    record = {"argv": sys.argv[1:], "environ": dict(os.environ), "path": sys.path, "plugins": found}
    Path(os.environ["FAKE_RECORD"]).write_text(json.dumps(record))
    print("\x1b[93m[12-01 10:00:00] a warning in colour\x1b[0;0m\nLoading:   0%|\rLoading: 100%|")
    if mode == "slow":
        time.sleep(60)
    if mode == "crash":
        raise RuntimeError("no such model")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode.endswith("falls back"):
        print(f"\x1b[91mError while loading customized {mode.split()[0]}, falling back to native version\x1b[0;0m")
    if mode == "no plugin":
        print("Failed to load diffusion plugin miles_dmd2")
    Handler.failed = Path(os.environ["FAKE_RECORD"] + ".failed")
    held = [listen(int(option("--scheduler-port"))), listen(int(option("--master-port")))]
    server = ThreadingHTTPServer((option("--host"), int(option("--port"))), Handler)
    try:
        Handler.broker = listen(server.server_port + 1)
    except OSError:  # as in the real one, this is found out only by /health
        Handler.broker = None
    Handler.worker = subprocess.Popen([sys.executable, "-c", WORKER])
    server.serve_forever()
    del held


if __name__ == "__main__":
    main()
