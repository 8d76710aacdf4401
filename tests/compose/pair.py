"""Checks of a running project from start to stop: start order, rights, endpoints, handoff, replicas, and a killed
container.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from tests.compose.chats import answered_differently
from tests.compose.command import succeeds, wait_until
from tests.compose.doors import NUM_AT_A_TIME, grpc, http, load, rows_served
from tests.compose.images import BUILT, image_of
from tests.compose.project import Container, Project
from tests.compose.report import Report
from tests.compose.victim import Victim

UP_TIMEOUT_S = 600
_STOP_GRACE_S = 45
_NUM_UNDER_KILL = 64
_KILL_AFTER = 16
_LONG = 30
"""Number of filler sentences that make a prompt long enough to keep a prefill service busy for a while."""


def bring_up(project: Project, services: Sequence[str], report: Report) -> None:
    with report.step(f"up: {', '.join(services)}"):
        project.compose("up", "--detach", "--no-build", *services, timeout_s=UP_TIMEOUT_S)
        project.wait_healthy(services, timeout_s=UP_TIMEOUT_S)
        begun = [project.containers(name)[0].inspect()["State"]["StartedAt"] for name in BUILT]
        report.expect(
            begun == sorted(begun), "started in the order prefill, decode, gateway, each behind a healthy one"
        )


def check_rights(project: Project, report: Report) -> None:
    with report.step("what the containers may do"):
        for service in (*BUILT, "prometheus"):
            (container,) = project.containers(service)
            settings = container.inspect()["HostConfig"]
            report.expect(settings["CapDrop"] == ["ALL"], f"{service} has no capabilities")
            report.expect("no-new-privileges:true" in settings["SecurityOpt"], f"{service} gains no privileges")
            user = container.execute("id", "-u").strip()
            report.expect(user != "0", f"{service} runs as user {user}")
            roots = [
                mount for mount in container.execute("cat", "/proc/mounts").splitlines() if mount.split()[1] == "/"
            ]
            report.expect(all("ro" in mount.split()[3].split(",") for mount in roots), f"{service}'s root is read-only")
            report.expect(not _writes(container, "/var/tmp/x"), f"{service} writes nowhere but to its volume and /tmp")


def _writes(container: Container, path: str) -> bool:
    return succeeds(["docker", "exec", container.id, "touch", path], timeout_s=30)


def chat(project: Project, report: Report) -> None:
    with report.step(f"{NUM_AT_A_TIME} chats at a time through the gateway"):
        by_http = load(http(project), num_requests=NUM_AT_A_TIME, report=report)
    address = project.compose("port", "decode", "50051", timeout_s=60).strip()
    with report.step(f"{NUM_AT_A_TIME} chats at a time through gRPC, {address}"):
        report.expect(address.startswith("127.0.0.1:"), "`compose port decode 50051` tells where")
        by_grpc = load(grpc(project), num_requests=NUM_AT_A_TIME, report=report)
        differing = answered_differently(by_http, by_grpc)
        report.expect(not differing, f"the same tokens through both, for each question {differing or ''}".strip())


def check_handoff(project: Project, report: Report) -> None:
    """Checks, after some chats, that the KV of each prefill replica went through shared memory, that drafts were
    accepted, and that no dead socket is left.
    """
    with report.step("KV through shared memory, drafts accepted"):
        replicas = project.containers("prefill")
        for container in replicas:
            lent, handed = (_counter(container, f"baton_handoff_{name}_total") for name in ("lent_bytes", "bytes"))
            report.expect(lent == handed > 0, f"{lent:,} of {handed:,} bytes through shared memory")
        for container in project.containers("decode"):
            drafted, accepted = (_counter(container, f"baton_{name}_tokens_total") for name in ("drafted", "accepted"))
            report.expect(0 < accepted <= drafted, f"{accepted:,} of {drafted:,} drafts accepted")
            left = container.execute("ls", "-A", "/dev/shm").split()
            pools = [name for name in left if name.startswith("baton-kv-")]
            report.expect(len(pools) == len(replicas), f"a socket of each prefill replica in /dev/shm: {left}")


def scale(project: Project, services: Sequence[str], report: Report) -> None:
    with report.step("--scale prefill=2 --scale decode=2"):
        scales = ("--scale", "prefill=2", "--scale", "decode=2")
        project.compose("up", "--detach", "--no-build", "--no-recreate", *scales, *services, timeout_s=UP_TIMEOUT_S)
        project.wait_healthy(services, timeout_s=UP_TIMEOUT_S)
    replicas = [project.containers(name) for name in ("prefill", "decode")]
    report.expect(all(len(containers) == 2 for containers in replicas), "two of each, healthy")


def have_all_serve(project: Project, report: Report) -> None:
    replicas = {name: project.containers(name) for name in ("prefill", "decode")}
    with report.step("every replica serves what comes through the gateway"):
        new_questions = itertools.count(NUM_AT_A_TIME, NUM_AT_A_TIME)  # the replica that has the old ones gets them

        def all_served() -> bool:
            load(http(project), num_requests=NUM_AT_A_TIME, first=next(new_questions), report=report)
            return all(rows_served(container) for containers in replicas.values() for container in containers)

        wait_until("a row served by each replica", all_served, timeout_s=120)
        for name, containers in replicas.items():
            report.note(f"rows served by each {name}: {[rows_served(container) for container in containers]}")


def kill_a_prefill(project: Project, report: Report) -> None:
    """Kills a prefill container under load. The other one must compute its prompts, every chat must be answered, and it
    must be restarted.
    """
    with report.step(f"{_NUM_UNDER_KILL} chats through both doors, a prefill container killed meanwhile"):
        container = project.containers("prefill")[1]
        victim = Victim(container, image=image_of(project, "gateway"), kill_after=_KILL_AFTER)
        before = _retries(project)
        doors = http(project, num_fillings=_LONG), grpc(project, num_fillings=_LONG)
        outcome = load(*doors, num_requests=_NUM_UNDER_KILL, report=report, on_answer=victim.on_answer)
        differing = answered_differently(outcome)
        report.expect(not differing, f"the same tokens through both, for each question {differing or ''}".strip())
        report.expect(victim.num_rows_lost > 0, f"killed with {victim.num_rows_lost} rows in flight")
        retries = _retries(project)
        handed = f"rows were handed to the other replica, by each decode {before} before and {retries} after"
        report.expect(sum(retries) > sum(before), handed)
        project.wait_healthy(["prefill"], timeout_s=UP_TIMEOUT_S)
        report.expect(container.num_restarts == 1, "it was started again, and is healthy")


def _retries(project: Project) -> list[int]:
    """Returns the number of retried rows of each decode service."""
    return [_counter(container, "baton_row_retries_total") for container in project.containers("decode")]


def _counter(container: Container, name: str) -> int:
    (line,) = [line for line in container.metrics().splitlines() if line.startswith(f"{name} ")]
    return int(float(line.split()[1]))


def stop(project: Project, report: Report) -> None:
    """Stops the containers with SIGTERM, one after the other."""
    with report.step("SIGTERM"):
        containers = [(name, container) for name in reversed(BUILT) for container in project.containers(name)]
        for name, container in containers:
            begun_at_s = time.monotonic()
            container.stop(grace_s=_STOP_GRACE_S)
            took_s = time.monotonic() - begun_at_s
            ended = f"{name} ended with status {container.exit_code} after {took_s:.1f} s"
            report.expect(container.exit_code == 0 and took_s < _STOP_GRACE_S, ended)


def tear_down(project: Project, report: Report) -> None:
    with report.step("down, with volumes"):
        project.down()
        leftovers = project.leftovers()
        report.expect(leftovers == [], f"nothing is left {leftovers or ''}".strip())
