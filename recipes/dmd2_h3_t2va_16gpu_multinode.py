"""MiniMax H3, text to video with sound, in 4 steps: full-parameter DMD2 on 2 nodes with 8 GPUs each. See docs/h3.md.

    python recipes/dmd2_h3_t2va_16gpu_multinode.py --checkpoint MiniMax-H3/FL2VA --sglang-python ENV/bin/python \
        --prompts PROMPTS --shared SHARED --dry-run

--checkpoint, --prompts (a directory of scripts/prepare_prompts.py) and --shared (what the run writes) lie on a file
system that all nodes see under one path. --dry-run prints what runs where, the batch plan and the memory plan; without
it the run starts on the Ray cluster that this host belongs to. Any option of train_diffusion.py may follow and
overrides the recipe's own.

    --nodes 1                        the same on one node
    --reference teacher|fasth3       no training: the eval prompts by H3 at 50 steps, or by FastH3's transformer at 4
    --tiny                           everything tiny, on a CPU: for a checkpoint of tests/tiny_h3.py

Figures are those of FastH3 Preview v1 (Dense, Data-Free) unless the line says "our choice".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import train_diffusion
from miles_dmd2.config import ConfigError
from miles_dmd2.data.pinned import verify_split

TEACHER_STEPS, STUDENT_STEPS = 50, 4
WINDOW, CRITIC_STEPS = 64, 5
REFERENCES = ("teacher", "fasth3")


@dataclass(frozen=True)
class Setup:
    """Where things are, and how large the run is."""

    checkpoint: Path
    sglang_python: Path
    prompts: Path
    shared: Path
    nodes: int = 2
    gpus_per_node: int = 8
    ray_address: str | None = "auto"
    eval_interval: int = 10
    fasth3_transformer: Path | None = None
    tiny: bool = False

    @property
    def window(self) -> int:
        return 4 if self.tiny else WINDOW

    @property
    def engines(self) -> int:
        """One on each device. The host of a single node has no room for all their copies beside the trainers'."""
        devices = self.nodes * self.gpus_per_node
        return max(1, devices // 2) if self.nodes == 1 else devices


def model(setup: Setup) -> list[str]:
    """Student and critic start from the checkpoint, the teacher stays it; all in fp32, forwards in bf16."""
    # Our choice: the default canvas of SGLang's H3, and the shortest clip that the release is made for.
    height, width, seconds = (32, 32, 0.9) if setup.tiny else (512, 896, 4)
    return [
        f"--hf-checkpoint={setup.checkpoint}",
        f"--diffusion-height={height}",
        f"--diffusion-width={width}",
        f"--diffusion-duration={seconds}",
        "--forward-dtype=bf16",
        "--gradient-checkpointing",  # our choice: without it the blocks keep 24 MB a token for backward, 360 GB
    ]


def grid(steps: int) -> list[str]:
    """The uniform grid through shift 12, of the student and of the references."""
    return [f"--diffusion-num-steps={steps}", "--diffusion-flow-shift=12"]


def student() -> list[str]:
    return [
        *grid(STUDENT_STEPS),
        "--diffusion-step-strategy=stop_at_random_step",
        "--dmd2-student-sample-type=ode",
        "--diffusion-guidance-scale=1.0",
    ]


def scores() -> list[str]:
    """The teacher is unguided: guidance is distilled into H3."""
    return [
        "--loss-type=dmd2",
        "--dmd2-teacher-guidance-scale=1.0",
        "--dmd2-critic-loss-space=x0",
        "--dmd2-score-sigma-range",
        "0.001",
        "0.999",
        "--fsdp-flow-shift=visual=5.0",
    ]


def optimizers() -> list[str]:
    """Of critic and student alike."""
    return [
        "--lr=2e-6",
        "--lr-schedule=constant",
        "--adam-beta1=0.9",
        "--adam-beta2=0.999",
        "--weight-decay=0.01",
        "--clip-grad=1.0",
    ]


def batches(setup: Setup) -> list[str]:
    """Five critic steps of 64 samples and a student step on the last 64 in each rollout: FastH3's 1000 steps in 200."""
    samples = CRITIC_STEPS * setup.window
    return [
        f"--num-rollout={2 if setup.tiny else 200}",
        f"--num-steps-per-rollout={CRITIC_STEPS}",
        f"--global-batch-size={samples}",
        f"--rollout-batch-size={samples}",  # our choice: as many prompts as samples, 64,000 of the 248,221
        "--n-samples-per-prompt=1",
        "--micro-batch-size=1",  # our choice: one packed sequence at a time is what the network takes
    ]


def rollouts(setup: Setup) -> list[str]:
    """SGLang's servers, each on one device; weights reach them as files on the shared file system."""
    return [
        "--rollout-engine=sglang",
        f"--sglang-python={setup.sglang_python}",
        f"--rollout-num-engines={setup.engines}",
        *([] if setup.tiny else [f"--sglang-weight-directory={setup.shared / 'weights'}"]),
        "--rm-type=none",
        f"--prompt-data={setup.prompts / 'train.jsonl'}",
    ]


def evaluation(setup: Setup, name: str) -> list[str]:
    """26 prompts with fixed seeds; files of the same name in run/, teacher/ and fasth3/ compare directly."""
    return [
        f"--eval-prompt-data={setup.prompts / 'eval_media.jsonl'}",
        f"--save-eval-media-dir={setup.shared / 'eval_media' / name}",
        "--diffusion-fps=24",  # of playback: H3's requests carry none
    ]


def cluster(setup: Setup, name: str) -> list[str]:
    """For an H200's 141 GB, which are 139 GiB, and hosts of 2 TiB: see the memory plan of --dry-run."""
    flags = [
        f"--actor-num-nodes={setup.nodes}",
        f"--actor-num-gpus-per-node={setup.gpus_per_node}",
        f"--run-dir={setup.shared / name}",
        *([] if setup.ray_address is None else [f"--ray-address={setup.ray_address}"]),
    ]
    if setup.tiny:
        return [*flags, "--device=cpu"]
    return [
        *flags,
        "--device=cuda",
        "--gpu-memory-gb=149",
        "--host-memory-gb=2199",
        "--load-ranks-at-once=1",  # each has the critic and the teacher whole in host memory while it loads: 265 GB
        "--start-timeout=3600",
        "--engine-request-timeout=3600",  # an update too: 16 servers read 66 GB each from one file system
        "--phase-timeout=7200",
    ]


def checkpoints(setup: Setup) -> list[str]:
    """Our choice: a checkpoint has two networks with two moments each in fp32, 795 GB."""
    return [] if setup.tiny else ["--save-interval=50", "--keep-last=2"]


def train_flags(setup: Setup) -> list[str]:
    return [
        *model(setup),
        *student(),
        *scores(),
        *optimizers(),
        *batches(setup),
        *rollouts(setup),
        *evaluation(setup, "run"),
        f"--eval-interval={setup.eval_interval}",
        *cluster(setup, "run"),
        *checkpoints(setup),
    ]


def reference_flags(setup: Setup, reference: str) -> list[str]:
    """The eval prompts once, by what the student is compared with; no trainer is started."""
    swapped = [f"--reference-transformer={setup.fasth3_transformer}"] if reference == "fasth3" else []
    return [
        *model(setup),
        *grid(STUDENT_STEPS if reference == "fasth3" else TEACHER_STEPS),
        *batches(setup),
        *rollouts(setup),
        *evaluation(setup, reference),
        *cluster(setup, reference),
        "--debug-rollout-only=eval",
        *swapped,
    ]


# What the user gives -> what of the recipe says the same thing in another way.
INSTEAD_OF = {
    "--no-gradient-checkpointing": ("--gradient-checkpointing",),
    "--diffusion-num-frames": ("--diffusion-duration",),
    "--diffusion-sigmas": ("--diffusion-flow-shift", "--diffusion-num-steps"),
}


def overridden(flags: Sequence[str], given: Sequence[str]) -> list[str]:
    """The recipe's flags without those that the user gives, values of several words included."""
    names = {word.partition("=")[0] for word in given if word.startswith("--")}
    names |= {other for name in names & INSTEAD_OF.keys() for other in INSTEAD_OF[name]}
    kept: list[str] = []
    skip = False
    for word in flags:
        if word.startswith("--"):
            skip = word.partition("=")[0] in names
        if not skip:
            kept.append(word)
    return [*kept, *given]


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The recipe's own options, and those of train_diffusion.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="MiniMax H3 as released, the directory with model_index.json")
    add("--sglang-python", type=Path, required=True, help="Python of SGLang's environment, the same on all nodes")
    add("--prompts", type=Path, required=True, help="directory that scripts/prepare_prompts.py wrote")
    add("--expect-sha256", nargs="*", default=[], metavar="NAME=HASH", help="of train, test or eval_media in --prompts")
    add("--shared", type=Path, required=True, help="directory for everything that is written, on a shared file system")
    add("--nodes", type=int, help="default: 2 (with --tiny 1)")
    add("--gpus-per-node", type=int, help="default: 8 (with --tiny 2 ranks on the CPU)")
    add("--ray-address", help="of the running cluster (default: the one this host belongs to; with --tiny its own)")
    add("--eval-interval", type=int, default=10, help="rollouts between evals (default: %(default)s)")
    add("--reference", choices=REFERENCES, help="render the eval prompts with it instead of training")
    add("--fasth3-transformer", type=Path, help="transformer of the few-step release, with --reference fasth3")
    add("--tiny", action="store_true", help="the same recipe with everything small, on a CPU")
    own, given = parser.parse_known_args(argv)
    if (own.reference == "fasth3") != (own.fasth3_transformer is not None):
        parser.error("--reference fasth3 and --fasth3-transformer DIR belong together")
    return own, given


def command(argv: Sequence[str] | None = None) -> list[str]:
    """The flags of train_diffusion.py that a command line of the recipe stands for."""
    own, given = parse(argv)
    setup = Setup(
        checkpoint=own.checkpoint,
        sglang_python=own.sglang_python,
        prompts=own.prompts,
        shared=own.shared,
        nodes=(1 if own.tiny else 2) if own.nodes is None else own.nodes,
        gpus_per_node=(2 if own.tiny else 8) if own.gpus_per_node is None else own.gpus_per_node,
        ray_address=own.ray_address or (None if own.tiny else "auto"),
        eval_interval=own.eval_interval,
        fasth3_transformer=own.fasth3_transformer,
        tiny=own.tiny,
    )
    return overridden(reference_flags(setup, own.reference) if own.reference else train_flags(setup), given)


def check_prompts(argv: Sequence[str] | None = None) -> None:
    """ConfigError: prompts that are not those of their manifest, or not those that --expect-sha256 names."""
    own, _ = parse(argv)
    verify_split(own.prompts, dict(pair.partition("=")[::2] for pair in own.expect_sha256))


if __name__ == "__main__":
    try:
        check_prompts()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    flags = command()
    sys.argv[0] = train_diffusion.__file__  # the command that continues a run is one of train_diffusion.py
    sys.exit(train_diffusion.main(flags))
