"""A Ray cluster of several nodes on this machine that serves Baton."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray._private import state
from ray.cluster_utils import Cluster

from baton.client import Client
from baton.errors import Unavailable
from baton.service_log import serving_port
from tests.compose.command import CommandFailed

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_DEDUP_LOGS": "0",
}
NODE = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": 100 << 20}
START_TIMEOUT_S = 300.0
_POLL_S = 0.25


@dataclass(frozen=True)
class Replica:
    """One running replica of a deployment: its id, the process of its actor, the id of its node."""

    name: str
    deployment: str
    pid: int
    node_id: str


class RayCluster:
    """A head node and others, all on this machine. Use it as a context manager.

    The head has the resource "head".
    """

    def __init__(self, *, num_nodes: int) -> None:
        os.environ.update(ENVIRONMENT)
        self._cluster = Cluster(initialize_head=True, head_node_args={**NODE, "resources": {"head": 1}})
        try:
            self._nodes = [self.add_node() for _ in range(num_nodes - 1)]
            ray.init(address=self._cluster.address, log_to_driver=False)
        except BaseException:
            self._cluster.shutdown()
            raise
        context = ray.get_runtime_context()
        self.log_dir = Path(context.get_temp_dir(), context.get_session_name(), "logs")

    def stop_serving(self) -> None:
        serve.delete("baton")

    def serve(self, config: Mapping[str, Any], directory: Path) -> None:
        """Starts an application as a user does, with `serve run` and a file."""
        (file := directory / "baton.yaml").write_text(yaml.safe_dump(config))
        command = [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking", str(file)]
        environment = {**os.environ, "RAY_ADDRESS": self._cluster.address}
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
        if ran.returncode != 0:
            raise CommandFailed(f"serve run: {ran.stderr[-2000:]}")

    def add_node(self) -> Any:
        return self._cluster.add_node(**NODE)

    def kill_node(self, node_id: str) -> None:
        """Kills the node's Ray processes at once. Its services die with them."""
        (node,) = [each for each in self._cluster.worker_nodes if each.node_id == node_id]
        self._cluster.remove_node(node, allow_graceful=False)

    @property
    def worker_ids(self) -> Sequence[str]:
        """The ids of the nodes that are not the head."""
        return [node.node_id for node in self._cluster.worker_nodes]

    def placement_groups(self) -> Sequence[Sequence[Mapping[str, float]]]:
        """Returns the bundles of each placement group that exists."""
        groups = ray.util.placement_group_table().values()
        return [list(group["bundles"].values()) for group in groups if group["state"] == "CREATED"]

    def replicas(self) -> Sequence[Replica]:
        """Returns the replicas whose actors live, in the order of their names."""
        found = []
        for actor in state.actors(actor_state_name="ALIVE").values():
            kind, _, name = actor["Name"].partition("::baton#")
            if kind == "SERVE_REPLICA":
                deployment, _, replica = name.partition("#")
                found.append(Replica(replica, deployment, actor["Pid"], actor["Address"]["NodeID"]))
        return sorted(found, key=lambda each: (each.deployment, each.name))

    def num_running(self) -> Mapping[str, int]:
        """Returns how many replicas of each deployment run, as Serve has it."""
        deployments = serve.status().applications["baton"].deployments
        return {name: each.replica_states.get("RUNNING", 0) for name, each in deployments.items()}

    def address(self, replica: Replica) -> str | None:
        """Returns where a decode or prefill service listens; None before it does."""
        port = serving_port(self.log(replica))
        return None if port is None else f"{ray.util.get_node_ip_address()}:{port}"

    def log(self, replica: Replica) -> str:
        """Returns what the replica's service has logged so far."""
        log = self.log_dir / f"baton-{replica.deployment}-{replica.name}.log"
        return log.read_text() if log.exists() else ""

    def num_rows(self, replica: Replica) -> int:
        """Returns how many requests a decode replica has in its rows; 0 if it does not listen, or no more."""
        address = self.address(replica)
        if address is None:
            return 0
        with Client(address, rpc_timeout_s=5.0) as client, suppress(Unavailable):
            return client.load().rows.held
        return 0

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


def wait_until(holds: Callable[[], bool], *, timeout_s: float, about: Callable[[], object]) -> None:
    """Waits until `holds()`. Raises TimeoutError after `timeout_s`, which says what `about()` returns."""
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > timeout_s:
            raise TimeoutError(f"not so within {timeout_s:g} s: {about()}")
        time.sleep(_POLL_S)
