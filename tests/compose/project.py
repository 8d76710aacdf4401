"""One compose project: its containers, and their state, metrics and logs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.compose.command import CommandFailed, run, succeeds, wait_until


def compose_command() -> tuple[str, ...]:
    """Returns the command for compose: docker's plugin, or else the older program docker-compose."""
    if succeeds(["docker", "compose", "version"], timeout_s=30):
        return ("docker", "compose")
    return ("docker-compose",)


@dataclass(frozen=True)
class Container:
    """A container, identified by its id."""

    id: str

    def inspect(self) -> Any:
        return json.loads(run(["docker", "inspect", self.id], timeout_s=30))[0]

    @property
    def health(self) -> str:
        """The container's health if it runs and has a health check, and otherwise its state: "running", "restarting"
        or "exited".
        """
        state = self.inspect()["State"]
        return str(state["Health"]["Status"] if state["Status"] == "running" and "Health" in state else state["Status"])

    @property
    def exit_code(self) -> int:
        return int(self.inspect()["State"]["ExitCode"])

    def port(self, port: int) -> int:
        """Returns the host's port for the container's `port`."""
        (binding,) = self.inspect()["NetworkSettings"]["Ports"][f"{port}/tcp"]
        assert binding["HostIp"] == "127.0.0.1", binding
        return int(binding["HostPort"])

    def execute(self, *command: str) -> str:
        return run(["docker", "exec", self.id, *command], timeout_s=30)

    def crash(self, *, image: str) -> None:
        """Kills the container's process with SIGKILL from outside, as the kernel does when memory runs out. `docker
        kill` would prevent the restart.

        `image` must have a shell. It runs in the host's process namespace, with the right to send signals.
        """
        pid = str(self.inspect()["State"]["Pid"])
        rights = ["--pid", "host", "--user", "0", "--cap-drop", "ALL", "--cap-add", "KILL"]
        run(["docker", "run", "--rm", *rights, image, "sh", "-c", f"kill -9 {pid}"], timeout_s=30)

    @property
    def num_restarts(self) -> int:
        return int(self.inspect()["RestartCount"])

    def stop(self, *, grace_s: int) -> None:
        """Sends SIGTERM, and SIGKILL after `grace_s`."""
        run(["docker", "stop", "--time", str(grace_s), self.id], timeout_s=grace_s + 30)

    def metrics(self) -> str:
        """Returns the service's Prometheus metrics, which are only reachable from inside the container."""
        script = (
            "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics', timeout=5).read().decode())"
        )
        return self.execute("python", "-c", script)


@dataclass(frozen=True, kw_only=True)
class Project:
    name: str
    directory: Path
    files: tuple[str, ...]
    environment: Mapping[str, str]
    env_file: str = ".env.example"

    @cached_property
    def _compose(self) -> tuple[str, ...]:
        files = [part for file in self.files for part in ("-f", file)]
        return (*compose_command(), "--env-file", self.env_file, "-p", self.name, *files)

    def compose(self, *arguments: str, timeout_s: float) -> str:
        return run(
            [*self._compose, *arguments], timeout_s=timeout_s, environment=self.environment, directory=self.directory
        )

    def containers(self, service: str) -> list[Container]:
        """Returns the service's containers, running or not, the oldest first."""
        labels = (f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}")
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        ids = run(["docker", "ps", "--all", "--quiet", *filters], timeout_s=30).split()
        return [Container(id) for id in reversed(ids)]

    def wait_healthy(self, services: Sequence[str], *, timeout_s: float) -> None:
        """Waits until the services are healthy; those without a health check must run. Raises TimeoutError, or
        CommandFailed if one has ended.
        """

        def is_so() -> bool:
            states = [container.health for service in services for container in self.containers(service)]
            if "exited" in states:
                raise CommandFailed(f"one of {', '.join(services)} has ended")
            return all(state in ("healthy", "running") for state in states)

        wait_until(f"{', '.join(services)} healthy", is_so, timeout_s=timeout_s)

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "15", timeout_s=60)

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "20", timeout_s=180)

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes that `down` should have removed."""
        label = ["--quiet", "--filter", f"label=com.docker.compose.project={self.name}"]
        kinds = (["ps", "--all"], ["network", "ls"], ["volume", "ls"])
        return [f"{kind[0]} {name}" for kind in kinds for name in run(["docker", *kind, *label], timeout_s=30).split()]
