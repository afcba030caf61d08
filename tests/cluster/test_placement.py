"""What only a running cluster can tell is told before any actor starts."""

from __future__ import annotations

import pytest
import ray

from miles_dmd2.cluster.placement import place
from miles_dmd2.cluster.runtime import ray_session
from miles_dmd2.config import ConfigError
from miles_dmd2.observability import RunError

pytestmark = pytest.mark.ray


def test_devices_are_counted_reserved_and_given_back() -> None:
    with ray_session(None, 2, "cpu"):
        with pytest.raises(ConfigError, match="--actor-num-gpus-per-node 3 needs 3 devices, the cluster has 2"):
            place(1, 3, "cpu", timeout=5)
        with pytest.raises(ConfigError, match="wants 1 on each of 2"):
            place(2, 1, "cpu", timeout=5)  # both devices are on one node
        placement = place(1, 2, "cpu", timeout=5)
        assert sorted(placement.bundles) == [0, 1]
        with pytest.raises(RunError, match="were not free within"):
            place(1, 1, "cpu", timeout=1)
        placement.release()
    assert not ray.is_initialized()
