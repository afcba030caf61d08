"""Flags: names, values, and what goes together."""

from tests.bad_input.bench import Case, Table, flags

FLAGS: Table = {
    "unknown": flags("--num-rolout 3", "--num-rolout", "no such flag", "the nearest is --num-rollout"),
    "word alone": flags("7", "7", "a value without a flag", "see --help"),
    "value for a switch": flags("--use-wandb true", "true", "--use-wandb takes no value", "see --help"),
    "equals for a switch": flags("--use-wandb=true", "--use-wandb", "'true'", "it takes no value"),
    "no value": flags("--lr", "--lr", "expected one argument", "a number > 0"),
    "one of two values": flags("--dmd2-score-sigma-range 0.1", "--dmd2-score-sigma-range", "2 arguments", "two num"),
    "twice": flags("--lr 1 --lr 2", "--lr", "as 1 and as 2", "keep one of them"),
    "on and off": flags("--use-wandb --no-use-wandb", "--use-wandb", "--no-use-wandb", "keep one of them"),
    "required": flags("--hf-checkpoint= --num-rollout=", "--hf-checkpoint", "--num-rollout", "is required"),
    "blank": Case(lambda _: ["--wandb-project", " "], "--wandb-project", "' '", "leave it out"),
    "NUL": Case(lambda _: ["--wandb-project", "a\0b"], "--wandb-project", r"a\x00b", "NUL character"),
    "not above 0": flags("--lr 0", "--lr", "0", "a number > 0"),
    "below 0": flags("--weight-decay -0.1", "--weight-decay", "-0.1", "a number >= 0"),
    "not below 1": flags("--adam-beta1 1", "--adam-beta1", "1", ">= 0 and < 1"),
    "no count": flags("--num-rollout 2.5", "--num-rollout", "2.5", "a whole number > 0"),
    "too many": flags("--num-rollout 99999999999", "--num-rollout", "99999999999", "<= 2147483647"),
    "negative seed": flags("--seed -1", "--seed", "-1", "a whole number >= 0"),
    "no choice": flags("--lr-schedule Cosine", "--lr-schedule", "Cosine", "constant, linear, cosine"),
    "one choice": flags("--rm-type clip", "--rm-type", "clip", "none"),
    "not a pair of numbers": flags("--dmd2-score-sigma-range a b", "--dmd2-score-sigma-range", "a b", "two numbers"),
    "range": flags("--dmd2-score-sigma-range 0.9 1.5", "--dmd2-score-sigma-range", "0.9 1.5", "0.02 0.98"),
    "shift of sound": flags("--fsdp-flow-shift visual=5,audio=3", "--fsdp-flow-shift", "audio=3", "only visual"),
    "no weight": flags("--dmd2-part-weights 0", "--dmd2-part-weights", "0", "must have a weight above 0"),
    "a part twice": flags("--dmd2-part-weights 1,visual=2", "--dmd2-part-weights", "1,visual=2", "names visual twice"),
    "two lengths": flags(
        "--diffusion-num-frames 5 --diffusion-duration 2", "--diffusion-duration", "2", "leave one of them out"
    ),
    "a duration of pictures": flags("--diffusion-duration 2", "--diffusion-duration", "2", "no frame rate of its own"),
    "shift of what": flags("--fsdp-flow-shift depth=5", "--fsdp-flow-shift", "depth=5", "visual=5"),
    "shift no number": flags("--fsdp-flow-shift five", "--fsdp-flow-shift", "five", "a finite number"),
    "shift of nothing": flags("--fsdp-flow-shift 0", "--fsdp-flow-shift", "0", "> 0"),
    "metrics path": flags("--eval-metrics-path figures", "--eval-metrics-path", "figures", "module:function"),
    "guidance": flags("--diffusion-guidance-scale 3", "--diffusion-guidance-scale", "3", "leave it at 1.0"),
    "apart": flags("--no-colocate", "--no-colocate", "not available", "leave --colocate on"),
    "batch": flags("--global-batch-size 17", "--global-batch-size", "17", "set 16"),
    "windows": flags("--num-steps-per-rollout 3", "--num-steps-per-rollout", "3", "use 2 or 4"),
    "micro-batch": flags("--micro-batch-size 3", "--micro-batch-size", "3", "use 2 or 4"),
    "ranks and windows": flags(
        "--num-steps-per-rollout 8 --actor-num-gpus-per-node 4", "--num-steps-per-rollout", "window of 2", "use "
    ),
    "warm-up": flags("--lr-warmup-updates 6", "--lr-warmup-updates", "6", "must be less than"),
    "stop step": flags(
        "--diffusion-step-strategy full --dmd2-stop-step shared", "--dmd2-stop-step", "shared", "leave it out"
    ),
    "eval without prompts": flags("--eval-interval 5", "--eval-interval", "5", "give a prompt file"),
    "node smaller than ranks": flags(
        "--num-gpus-per-node 1 --actor-num-gpus-per-node 2", "--num-gpus-per-node", "1", "raise it to 2"
    ),
    "engines": flags("--rollout-num-engines 3", "--rollout-num-engines", "3", "use 1 or fewer"),
    "canvas": flags("--diffusion-height 33", "--diffusion-height", "33", "the nearest is 32"),
}
