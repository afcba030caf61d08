"""--trainer-config: what a trainer may override, what is refused by name, and the arithmetic of each trainer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from config_commands import command, complaint, run

from miles_dmd2.config import Config, ParsedRun, flatten, parse, resolve_trainers
from miles_dmd2.config.lora import Lora
from miles_dmd2.config.trainers import ARGS, TrainerSpec

Write = Callable[..., Path]
PAIR = "- {{name: critic, role: critic, args: {critic}}}\n- {{name: actor, role: actor, args: {actor}}}\n"


def pair(critic: str = "{}", actor: str = "{}") -> str:
    return PAIR.format(critic=critic, actor=actor)


def with_file(write: Write, text: str, *flags: str) -> ParsedRun:
    return run("--trainer-config", str(write(text, "trainers.yaml")), *flags)


def test_the_default_is_a_critic_then_an_actor() -> None:
    critic, actor = run("--actor-num-gpus-per-node", "2", "--lr", "1e-5").trainers
    assert critic == TrainerSpec(
        name="critic",
        role="critic",
        checkpoint=Path("teacher"),
        lr=1e-5,
        lr_schedule="constant",
        lr_warmup_updates=0,
        total_updates=50,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
        weight_decay=0.01,
        clip_grad=1.0,
        num_steps_per_rollout=5,
        window_size=4,
        num_ranks=2,
        micro_batch_size=2,
    )
    assert (actor.name, actor.role, actor.total_updates, actor.num_steps_per_rollout) == ("actor", "actor", 10, 1)
    assert (actor.window_size, actor.num_ranks, actor.micro_batch_size) == (4, 2, 2)
    assert (critic.samples_per_rank, critic.micro_batches) == (2, 1)


def test_overrides_reach_only_their_trainer(write: Write) -> None:
    text = pair("{lr: 4e-7, adam-beta1: 0, num_steps_per_rollout: 10, micro-batch-size: 1}", "{clip_grad: 10}")
    critic, actor = with_file(write, text, "--lr", "2e-6").trainers
    assert (critic.lr, critic.adam_beta1, critic.num_steps_per_rollout) == (4e-7, 0.0, 10)
    assert (critic.window_size, critic.total_updates, critic.micro_batches) == (2, 100, 2)
    assert (actor.lr, actor.adam_beta1, actor.clip_grad) == (2e-6, 0.9, 10.0)
    assert (actor.window_size, actor.total_updates, actor.micro_batches) == (2, 10, 1), "the critic cuts the windows"


def test_every_arg_of_the_whitelist_is_taken(write: Write) -> None:
    args = {
        "lr": "0.5",
        "lr_schedule": "linear",
        "lr_warmup_updates": "2",
        "adam_beta1": "0.5",
        "adam_beta2": "0.6",
        "adam_eps": "0.001",
        "weight_decay": "0.0",
        "clip_grad": "3.0",
        "num_steps_per_rollout": "2",
        "micro_batch_size": "5",
        "hf_checkpoint": "other",
        "num_gpus": "1",
    }
    assert set(args) == set(ARGS) - {"lora_rank", "lora_alpha", "lora_target_modules"}
    text = "{" + ", ".join(f"{name}: {value}" for name, value in args.items()) + "}"
    critic, _ = with_file(write, pair(text), "--actor-num-gpus-per-node", "2").trainers
    for name, value in args.items():
        field = {"hf_checkpoint": "checkpoint", "num_gpus": "num_ranks"}.get(name, name)
        assert str(getattr(critic, field)) == value


def test_an_adapter_is_each_trainers_own(write: Write) -> None:
    critic, actor = run("--lora-rank", "4").trainers
    assert critic.lora == actor.lora == Lora(4, 4, ("all-linear",))
    text = pair("{lora_rank: 0}", "{lora-alpha: 16, lora_target_modules: [to_q, to_v]}")
    critic, actor = with_file(write, text, "--lora-rank", "8").trainers
    assert (critic.lora, actor.lora) == (None, Lora(8, 16, ("to_q", "to_v")))
    assert actor.lora is not None
    assert actor.lora.scale == 2.0
    critic, actor = with_file(write, pair("{lora_rank: 2}"), "--lora-alpha", "3").trainers
    assert (critic.lora, actor.lora) == (Lora(2, 3), None)


def test_an_adapter_s_base_is_a_directory_however_it_is_spelled(write: Write, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "round").symlink_to(tmp_path / "round")
    base = ("--hf-checkpoint", str(tmp_path), "--lora-rank", "2")
    for spelled in (".", "link", f"link/../{tmp_path.name}"):
        critic, _ = with_file(write, pair(f"{{hf_checkpoint: {tmp_path}/{spelled}}}"), *base).trainers
        assert critic.lora == Lora(2, 2)
    for other in ("elsewhere", "round"):
        file = write(pair(f"{{hf_checkpoint: {tmp_path}/{other}}}"), "trainers.yaml")
        message = complaint(command("--trainer-config", str(file), *base))
        assert message.startswith(f"trainer critic: hf-checkpoint {tmp_path}/{other}: with --lora-rank 2"), message


def test_groups_may_differ_in_ranks(write: Write) -> None:
    critic, actor = with_file(write, pair(actor="{num-gpus: 1}"), "--actor-num-gpus-per-node", "2").trainers
    assert (critic.num_ranks, critic.samples_per_rank, actor.num_ranks, actor.samples_per_rank) == (2, 2, 1, 4)


def test_the_list_may_stand_in_the_config_file(write: Write) -> None:
    inline = write("trainer-config:\n" + "".join(f"  {line}\n" for line in pair("{lr: 1.0}").splitlines()))
    assert parse(command("--config", str(inline))).config == with_file(write, pair("{lr: 1.0}")).config


def test_names_are_free(write: Write) -> None:
    text = "- {name: fake_score, role: critic}\n- {name: student_1, role: actor, args: null}\n"
    assert [t.name for t in with_file(write, text).trainers] == ["fake_score", "student_1"]


def test_the_resolved_config_carries_the_list_and_gives_the_same_trainers(write: Write) -> None:
    parsed = with_file(write, pair("{lr: 4e-7}"))
    assert flatten(parsed.config)["trainer_config"] == [
        {"name": "critic", "role": "critic", "args": {"lr": 4e-7}},
        {"name": "actor", "role": "actor", "args": {}},
    ]
    assert resolve_trainers(Config.model_validate(parsed.config.model_dump())) == parsed.trainers


REFUSED: list[tuple[str, tuple[str, ...]]] = [
    ("3\n", ("must be a YAML list", "got 3")),
    ("{}\n", ("must be a YAML list",)),
    ("[]\n", ("must be a YAML list",)),
    ("- critic\n- actor\n", ("trainer 1", "must be a mapping", "name, role, args", "got critic")),
    ("- {nam: critic, role: critic}\n", ("trainer 1", "no such key nam", "nearest is name")),
    ("- {role: critic}\n", ("trainer 1", "name null", "lower-case")),
    ("- {name: Critic, role: critic}\n", ("trainer 1", "name Critic", "lower-case")),
    ("- {name: a/b, role: critic}\n", ("trainer 1", "name a/b", "lower-case")),
    ("- {name: critic, role: fake}\n", ("trainer 1 (critic)", "role fake", "critic, actor")),
    ("- {name: critic, role: critic, args: 3}\n", ("trainer 1 (critic)", "args 3", "mapping")),
    (pair().replace("name: actor", "name: critic"), ("2 trainers are named critic", "own name")),
    (pair().split("\n")[0], ("the roles are critic;", "one critic, then exactly one actor")),
    (pair().split("\n")[1], ("the roles are actor;", "one critic, then exactly one actor")),
    ("\n".join(reversed(pair().strip().split("\n"))), ("the roles are actor, critic", "in this order")),
    (pair() + "- {name: b, role: actor}\n", ("the roles are critic, actor, actor", "exactly one actor")),
    ("- {name: b, role: critic}\n" + pair(), ("the roles are critic, critic, actor", "exactly one critic")),
    (pair("{seed: 3}"), ("trainer 1 (critic)", "seed may not be set per trainer", "valid: ", "adam_beta1")),
    (pair("{learning_rate: 3}"), ("trainer 1 (critic)", "learning_rate may not", "nearest")),
    (pair(actor="{adam-beta: 3}"), ("trainer 2 (actor)", "adam-beta may not", "adam_beta")),
    (pair("{lr: 1, lr: 2}"), (":1", "lr is already on line 1")),
    (pair("{adam-eps: 1, adam_eps: 2}"), (":1", "adam_eps is already on line 1")),
    (pair(actor="{num_steps_per_rollout: 2}"), ("trainer 2 (actor)", "num_steps_per_rollout 2", "leave it out")),
    (pair("{lr: fast}"), ("trainer 1 (critic)", "lr fast", "a number > 0")),
    (pair("{lr: true}"), ("trainer 1 (critic)", "lr true", "a number > 0")),
    (pair("{lora-target-modules: []}"), ("trainer 1 (critic)", "lora-target-modules []", "names no layer")),
    (pair("{lr: null}"), ("trainer 1 (critic)", "lr null", "a number > 0")),
    (pair("{hf-checkpoint: 3}"), ("trainer 1 (critic)", "hf-checkpoint 3", "a path")),
    (pair("{num-gpus: 0}"), ("trainer 1 (critic)", "num-gpus 0", "a whole number > 0")),
    (pair(actor="{num-gpus: 2}"), ("trainer actor", "num-gpus 2", "1 devices", "use 1 or fewer")),
    (pair("{num-steps-per-rollout: 3}"), ("trainer critic", "--num-steps-per-rollout 3", "use 2 or 4")),
    (pair(actor="{micro-batch-size: 3}"), ("trainer actor", "--micro-batch-size 3", "use 2 or 4")),
    (pair(actor="{lr-warmup-updates: 10}"), ("trainer actor", "--lr-warmup-updates 10", "10 updates")),
    ("- {name: a, role: critic\n", ("not YAML", "fix that line")),
    ("", ("is empty", "YAML list")),
]


@pytest.mark.parametrize(("text", "parts"), REFUSED, ids=[repr(text) for text, _ in REFUSED])
def test_refused(write: Write, text: str, parts: tuple[str, ...]) -> None:
    file = write(text, "trainers.yaml")
    message = complaint(command("--trainer-config", str(file)))
    assert str(file) in message or message.startswith("trainer "), message
    for part in parts:
        assert part in message, message


def test_ranks_that_do_not_divide_are_told_with_what_would(write: Write) -> None:
    flags = ("--rollout-batch-size", "30", "--actor-num-gpus-per-node", "4")
    file = write(pair("{num-gpus: 3}"), "trainers.yaml")
    text = complaint(command("--trainer-config", str(file), *flags))
    assert text.startswith("trainer actor: a window of 6 samples (30 of a rollout / --num-steps-per-rollout 5)")
    assert "4 ranks" in text
    assert "3 or 6" in text
