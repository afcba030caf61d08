"""A whole run on two nodes of a simulated cluster, one of which is lost while it trains."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from run_commands import command, environment, wait_for

from miles_dmd2.checkpointing import read_manifest
from miles_dmd2.checkpointing.saving import complete_steps

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def test_a_run_that_loses_a_node_says_so_and_its_last_checkpoint_is_whole(workspace: Path) -> None:
    """A rank of each group goes with the node; the others fail as well, and the line is about what is gone, whatever
    the run was at: a checkpoint that was being written too.
    """
    node = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(num_cpus=1)
    words = command(
        workspace, "lost node", ray_address=cluster.address, actor_num_nodes=2, num_rollout=1000, save_interval=1
    )
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
    checkpoints = workspace / "lost node" / "checkpoints"
    try:
        wait_for((checkpoints / "step_000002").exists, 300)
        cluster.remove_node(second, allow_graceful=False)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        cluster.shutdown()
    assert process.returncode == 1, err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    lost = r"(cannot be reached: its node is lost: \S+ \([\d.]+\)|died: its node has died\. .*)"
    worker = r"(critic|actor|engine)_\d"
    assert re.fullmatch(rf"error: .*\w: {worker}( \(.*\))? {lost}; its log: .*/logs/{worker}\.log\b.*", line), line
    assert "Traceback" not in err
    assert f"--load {checkpoints}" in err or f"--load '{checkpoints}'" in err
    last = read_manifest(complete_steps(checkpoints)[-1])
    assert {name: group.world_size for name, group in last.groups.items()} == {"critic": 2, "actor": 2}
    assert not list(checkpoints.glob(".step_*"))
