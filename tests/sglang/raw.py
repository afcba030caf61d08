"""The server's own requests and replies, without the project's client: what the plugin does is tested on these."""

import base64
import json
import urllib.error
import urllib.request
from typing import Any

import msgpack
import torch
from safetensors.torch import load, save
from torch import Tensor

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy between us and loopback
DEADLINE = 120.0
CANVAS = 32  # tests/tiny_qwen.py's size: 4 tokens of 64 channels


class Server:
    """POST and GET; a refused request is its status and text."""

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, path: str, body: object = None) -> tuple[int, bytes, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with OPENER.open(request, timeout=DEADLINE) as reply:
                return reply.status, reply.read(), reply.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    def json(self, path: str, body: object = None) -> Any:
        status, content, _ = self.call(path, body)
        assert status == 200, content
        return json.loads(content)

    def rollout(self, **fields: object) -> dict[str, Any]:
        return self.exchange({**STOCK, **fields})

    def exchange(self, body: dict[str, object]) -> dict[str, Any]:
        status, content, _ = self.call("/rollout/generate", body)
        assert status == 200, content
        (response,) = tensors_of(msgpack.unpackb(content))
        return response

    def refusal(self, **fields: object) -> tuple[int, str]:
        status, content, _ = self.call("/rollout/generate", {**STOCK, **fields})
        return status, content.decode(errors="replace")


STOCK: dict[str, object] = {
    "prompt": "the digit seven",
    "seed": 5,
    "generator_device": "cpu",
    "width": CANVAS,
    "height": CANVAS,
    "num_inference_steps": 4,
    "num_outputs_per_prompt": 1,
    "guidance_scale": 1.0,
    "true_cfg_scale": 1.0,
    "rollout_sde_type": "ode",
    "rollout_noise_level": 0.0,
    "rollout_log_prob_no_const": True,
    "rollout_debug_mode": False,
    "rollout_return_denoising_env": True,
    "rollout_return_dit_trajectory": True,
    "suppress_logs": True,
}


def tensors_of(value: Any) -> Any:
    """SGLang's reply with its `__tensor__` records read."""
    if isinstance(value, dict):
        if value.get("__tensor__"):
            return load(value["data"])["t"]
        return {key: tensors_of(item) for key, item in value.items()}
    return [tensors_of(item) for item in value] if isinstance(value, list) else value


def encoded(tensors: dict[str, Tensor]) -> str:
    return base64.b64encode(save({name: tensor.contiguous() for name, tensor in tensors.items()})).decode()


def content(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
