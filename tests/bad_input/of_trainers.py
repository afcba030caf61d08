"""--trainer-config files."""

from tests.bad_input.bench import Case, Table, flags


def entries(content: str, name: str, value: str, remedy: str) -> Case:
    return Case(lambda bench: ["--trainer-config", str(bench.file("list.yaml", content))], name, value, remedy)


def pair(name: str, value: str, remedy: str, *, critic: str = "{}", actor: str = "{}") -> Case:
    content = f"- {{name: critic, role: critic, args: {critic}}}\n- {{name: actor, role: actor, args: {actor}}}\n"
    return entries(content, name, value, remedy)


CRITIC = "- {name: critic, role: critic}\n"

TRAINERS: Table = {
    "no list": entries("3\n", "--trainer-config", "got 3", "must be a YAML list"),
    "no mapping": entries("- critic\n", "trainer 1", "got critic", "must be a mapping with the keys"),
    "key": entries("- {nam: critic}\n", "trainer 1", "nam", "the nearest is name"),
    "name": entries("- {name: a/b, role: critic}\n", "trainer 1", "name a/b", "must be lower-case letters"),
    "role": entries("- {name: critic, role: fake}\n", "trainer 1 (critic)", "role fake", "critic, actor"),
    "args": entries("- {name: critic, role: critic, args: 3}\n", "trainer 1", "args 3", "must be a mapping of"),
    "names alike": entries(CRITIC * 2, "--trainer-config", "named critic", "give each its own name"),
    "roles": entries(CRITIC, "--trainer-config", "the roles are critic", "list them in this order"),
    "not per trainer": pair("trainer 1 (critic)", "seed", "the nearest that may is", critic="{seed: 3}"),
    "actor's steps": pair(
        "trainer 2 (actor)", "num_steps_per_rollout 2", "leave it out", actor="{num_steps_per_rollout: 2}"
    ),
    "value": pair("trainer 1 (critic)", "lr fast", "must be a number > 0", critic="{lr: fast}"),
    "truth": pair("trainer 1 (critic)", "num-gpus true", "must be a whole number > 0", critic="{num-gpus: true}"),
    "blank": pair("trainer 1 (critic)", "hf-checkpoint", "leave it out", critic="{hf-checkpoint: ''}"),
    "ranks": pair("trainer actor", "num-gpus 2", "use 1 or fewer", actor="{num-gpus: 2}"),
    "adapter's alpha": flags("--lora-alpha 8", "--lora-alpha 8", "never read with --lora-rank 0", "leave it out, or"),
    "adapter's layers": flags(
        "--lora-rank 2 --lora-target-modules to_x",
        "trainer critic: --lora-target-modules",
        "to_x: no linear layer",
        "all-linear takes all",
    ),
    "adapter's no layers": pair(
        "trainer 1 (critic): lora-target-modules",
        "[]: names no layer",
        "give one or more, all-linear, or leave it out",
        critic="{lora_rank: 2, lora_target_modules: []}",
    ),
    "adapter's idle layers": flags(
        "--lora-rank 2 --lora-target-modules transformer_blocks.1.attn.add_q_proj to_q",
        "trainer critic: --lora-target-modules",
        "transformer_blocks.1.attn.add_q_proj: no gradient ever comes to",
        "name other layers",
    ),
    "adapter's rank": flags("--lora-rank 999", "trainer critic: --lora-rank", "999: none of the layers", "use 64 or"),
    "adapter of one": pair(
        "trainer critic", "lora-alpha 3: is never read", "give this trainer a rank", critic="{lora_alpha: 3}"
    ),
    "adapter's base": pair(
        "trainer actor: hf-checkpoint /x", "the frozen base", "leave it out", actor="{lora_rank: 2, hf_checkpoint: /x}"
    ),
    "start": pair(
        "trainer critic: hf-checkpoint", "/nowhere", "give the directory", critic="{hf-checkpoint: /nowhere}"
    ),
}
