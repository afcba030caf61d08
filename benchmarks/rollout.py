"""What a rollout on SGLang costs, as ratios of two things timed in one run against one real server.

    python benchmarks/rollout.py --sglang-python ENV/bin/python [--pipeline DIR] [--repeats 15] [--out FILE.json]

Each pair is timed alternately, so that a busy machine slows both; a ratio is the median of the pairs' ratios, with the
quartiles as its spread. `make setup-sglang` prints a Python that will do; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

from miles_dmd2.algo import normal, sigma_grid
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.http import Transport
from miles_dmd2.engines.sglang.server import ManagedServer, SGLangLaunch
from miles_dmd2.engines.sglang.wire import Ask, parse_rollout, rollout_body
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.registry import build_adapter
from miles_dmd2.models.weights import checksum
from miles_dmd2.types import Probe, RolloutRequest, WeightUpdate, WeightVersion

GRID = tuple(sigma_grid(4, 3.0).tolist())
PROMPTS = ("the digit seven", "the digit two")


@dataclass(frozen=True)
class Ratio:
    """a / b over alternating pairs: median and quartiles, and the medians of both in `unit`."""

    what: str
    median: float
    low: float
    high: float
    a: float
    b: float
    unit: str

    def line(self) -> str:
        scale, unit = (1e3, "ms") if self.unit == "s" else (1.0, self.unit)
        spread = f"{self.median:6.2f}  ({self.low:.2f} to {self.high:.2f})"
        return f"{self.what:<62}{spread:<26}{self.a * scale:10.2f} / {self.b * scale:.2f} {unit}"


def timed(what: str, a: Callable[[], object], b: Callable[[], object], repeats: int) -> Ratio:
    """Alternately, after one round that does not count."""
    pairs = [(_seconds(a), _seconds(b)) for _ in range(repeats + 1)][1:]
    ratios = [first / second for first, second in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(
        what, median, low, high, statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs), "s"
    )


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def requests(count: int, stop: int | None = None, decode: bool = False) -> list[RolloutRequest]:
    """Stop steps go round, unless one is given."""
    return [
        RolloutRequest(i, PROMPTS[i % len(PROMPTS)], 100 + i, GRID, i % 4 if stop is None else stop, decode)
        for i in range(count)
    ]


def an_update(adapter: ModelAdapter) -> tuple[WeightUpdate, dict[str, Tensor]]:
    """The checkpoint's own weights, as an actor exports them."""
    transformer = adapter.load_transformer()
    tensors = {name: value.detach().clone() for name, value in transformer.state_dict().items()}
    x, sigma, cond = normal(5, (1, *adapter.latent_shape)), torch.tensor([0.5]), adapter.probe_conditioning()
    with torch.no_grad():
        velocity = adapter.velocity(transformer, x, sigma, adapter.collate([cond]))
    return WeightUpdate(WeightVersion(0), checksum(tensors), Probe(x, sigma, cond, velocity), None), tensors


class Raw:
    """The same requests without the client: bodies made before, replies read and dropped, as many in flight."""

    def __init__(self, url: str, adapter: ModelAdapter, weights: str | None, in_flight: int) -> None:
        self._url, self._adapter, self._weights = url, adapter, weights
        self._runner = asyncio.Runner()
        self._transport = self._runner.run(self._open())
        self._in_flight = in_flight

    async def _open(self) -> Transport:
        return Transport(600.0)

    def ask(self, request: RolloutRequest, *, conditioning: bool = False) -> Ask:
        return Ask(request, secrets.token_hex(8), self._weights, conditioning=conditioning)

    def send(self, bodies: Sequence[Mapping[str, object]]) -> list[bytes]:
        return self._runner.run(self._send(bodies))

    async def _send(self, bodies: Sequence[Mapping[str, object]]) -> list[bytes]:
        room = asyncio.Semaphore(self._in_flight)

        async def one(body: Mapping[str, object]) -> bytes:
            async with room:
                return (await self._transport.call(self._url, "POST", "/rollout/generate", body)).body

        return await asyncio.gather(*map(one, bodies))

    def close(self) -> None:
        self._runner.run(self._transport.close())
        self._runner.close()


def stop_and_decode(raw: Raw, adapter: ModelAdapter, count: int, repeats: int) -> list[Ratio]:
    """What the plugin saves on the server: the steps after the stop, and the VAE."""
    stopped = [rollout_body(raw.ask(request), adapter) for request in requests(count)]
    whole = [rollout_body(raw.ask(request), adapter) for request in requests(count, stop=3, decode=True)]
    undecoded = [rollout_body(raw.ask(request), adapter) for request in requests(count, stop=3)]
    return [
        timed("whole rollout and decode / stopped, not decoded", *_both(raw, whole, stopped), repeats),
        timed("whole rollout, not decoded / stopped, not decoded", *_both(raw, undecoded, stopped), repeats),
        timed("whole rollout and decode / whole rollout, not decoded", *_both(raw, whole, undecoded), repeats),
    ]


def _both(
    raw: Raw, a: Sequence[Mapping[str, object]], b: Sequence[Mapping[str, object]]
) -> tuple[Callable[[], object], Callable[[], object]]:
    return lambda: raw.send(a), lambda: raw.send(b)


def sizes(raw: Raw, adapter: ModelAdapter) -> list[Ratio]:
    """Bytes of a reply over what training reads of it: x_k, x0 and the grid, and once a prompt its conditioning."""
    found = []
    for what, conditioning in (("a sample", False), ("a prompt's first sample, with conditioning", True)):
        ask = raw.ask(requests(1)[0], conditioning=conditioning)
        (body,) = raw.send([rollout_body(ask, adapter)])
        answer = parse_rollout(body, ask, adapter)
        minimum = answer.x_k.nbytes + answer.x0.nbytes + 4 * len(GRID)
        minimum += sum(value.nbytes for value in (answer.cond or {}).values())
        ratio = len(body) / minimum
        found.append(Ratio(f"bytes of {what} / minimum", ratio, ratio, ratio, len(body), minimum, "bytes"))
    ask = dataclasses.replace(raw.ask(requests(1, stop=3)[0], conditioning=True), plugin=False)
    (body,) = raw.send([{**rollout_body(ask, adapter), "rollout_return_step_indices": None}])
    ratio = len(body) / minimum
    found.append(
        Ratio("bytes of SGLang's own reply, all its fields / minimum", ratio, ratio, ratio, len(body), minimum, "bytes")
    )
    return found


def client(engine: SGLangEngine, raw: Raw, adapter: ModelAdapter, count: int, repeats: int) -> Ratio:
    """Scheduling, checks and parsing of our client, over the same requests sent bare."""
    wanted = requests(count)
    engine.conditioning(list(PROMPTS))  # so that both leave it out
    bodies = [rollout_body(raw.ask(request), adapter) for request in wanted]
    return timed(
        "client with all its checks / bare requests", lambda: engine.generate(wanted), lambda: raw.send(bodies), repeats
    )


def sync(engine: SGLangEngine, adapter: ModelAdapter, repeats: int) -> list[Ratio]:
    """A whole weight sync with its proofs over a copy of the same bytes in memory."""
    update, tensors = an_update(adapter)
    copies = {name: torch.empty_like(value) for name, value in tensors.items()}

    def copy() -> None:
        for name, value in tensors.items():
            copies[name].copy_(value)

    megabytes = sum(value.nbytes for value in tensors.values()) / 1e6
    what = f"weight sync of {megabytes:.1f} MB, proofs included / memory copy"
    return [timed(what, lambda: engine.load_weights(update, tensors), copy, repeats)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", type=Path, required=True, help="Python of an environment with SGLang")
    parser.add_argument("--pipeline", type=Path, default=ROOT / "recipes" / "digits" / "pipeline")
    parser.add_argument("--size", type=int, default=64, help="height and width")
    parser.add_argument("--repeats", type=int, default=15, help="pairs of each ratio")
    parser.add_argument("--count", type=int, default=32, help="requests of one timing")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    adapter = build_adapter(chosen.pipeline, chosen.size, chosen.size)
    logs = Path(tempfile.mkdtemp(prefix="md2-benchmark-"))
    launch = SGLangLaunch(
        python=chosen.sglang_python,
        model=chosen.pipeline,
        model_id=adapter.serving.model_id,
        arguments=tuple(adapter.serving.launch_arguments("fp32")),
        log=logs / "server.log",
        threads=1,
    )
    settings = SGLangSettings(require_plugin=True)
    try:
        with ManagedServer(launch) as server:
            engine = SGLangEngine(adapter, [server], settings, checkpoint_version=WeightVersion(0))
            raw = Raw(server.url, adapter, None, settings.max_in_flight)
            ratios = [
                *stop_and_decode(raw, adapter, chosen.count, chosen.repeats),
                *sizes(raw, adapter),
                client(engine, raw, adapter, chosen.count, chosen.repeats),
                *sync(engine, adapter, chosen.repeats),
            ]
            raw.close()
            engine.close()
    finally:
        shutil.rmtree(logs, ignore_errors=True)
    print(f"{chosen.count} requests a timing, {chosen.repeats} pairs; median (quartiles), then the medians of both")
    for ratio in ratios:
        print(ratio.line())
    if chosen.out is not None:
        chosen.out.write_text(json.dumps([dataclasses.asdict(ratio) for ratio in ratios], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
