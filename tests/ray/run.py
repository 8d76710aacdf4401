"""The run of `python -m tests.ray`, in the environment that has Ray."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import yaml

from baton.free_ports import HeldPorts
from tests.compose.chats import Outcome, answered_differently, ask, over_http
from tests.compose.report import Report, reported
from tests.ray.cluster import RayCluster, wait_until

ROOT = Path(__file__).parents[2]
NUM_CHATS = 64
NUM_AT_A_TIME = 8
NUM_WHILE_GROWING = 24
BOUND_S = 240.0
KINDS = ("prefill", "decode")
LONG = 40
"""Sentences in a prompt of the load, some 400 tokens."""


def main() -> int:
    return reported(_run)


def _run(report: Report) -> None:
    port = HeldPorts(1).numbers[0]
    with tempfile.TemporaryDirectory() as directory:
        with report.step("three nodes started"):
            cluster = RayCluster(num_nodes=3)
        with cluster:
            with report.step("serve run: 2 prefill, 2 decode, 1 gateway"):
                cluster.serve(_config(port), Path(directory))
                wait_until(lambda: _is_ready(port), timeout_s=BOUND_S, about=cluster.num_running)
            _lose_a_node(cluster, port, report)
            _scale(cluster, port, report)
            _gateway(cluster, port, report)
            _ranks(cluster, port, Path(directory), report)


def _config(port: int) -> Mapping[str, Any]:
    """Returns deploy/ray/baton.cpu.yaml with two replicas of each service on different nodes, a third one where the
    load is high, and times of seconds.
    """
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "baton.cpu.yaml").read_text())
    config["http_options"]["port"] = port
    config["proxy_location"] = "HeadOnly"
    (application,) = config["applications"]
    application["args"] = {
        "services": {"model": "demo", "dtype": "float32", "max_kv_tokens": 8192},
        "decode": {"max_rows": 4, "local_prefill_tokens": 0},
    }
    prefill, decode, gateway = application["deployments"]
    gateway["ray_actor_options"] = {"num_cpus": 0, "resources": {"head": 0.01}}  # its node is not the one that dies
    for deployment in (prefill, decode):
        deployment["max_replicas_per_node"] = 1
        deployment["autoscaling_config"] |= {
            "min_replicas": 2,
            "max_replicas": 3,
            "look_back_period_s": 11,  # Serve wants more than 10
            "upscale_delay_s": 2,
            "downscale_delay_s": 10,
        }
    prefill["autoscaling_config"]["policy"] = {
        "policy_function": "baton_ray.scaling:LoadPolicy",
        "policy_kwargs": {"target": 256},
    }
    return config


def _lose_a_node(cluster: RayCluster, port: int, report: Report) -> None:
    workers = cluster.worker_ids
    victim = next(each for each in cluster.replicas() if each.deployment == "decode" and each.node_id in workers)
    lost = [each.deployment for each in cluster.replicas() if each.node_id == victim.node_id]
    num_rows_lost, replaced = 0, None

    def is_replaced() -> bool:
        living = [each for each in cluster.replicas() if each.deployment in KINDS]
        running = cluster.num_running()
        is_gone = all(each.node_id != victim.node_id for each in living)
        return is_gone and len(living) == 4 and all(running[kind] == 2 for kind in KINDS)

    def seconds_until_replaced(died_at_s: float) -> float:
        wait_until(is_replaced, timeout_s=BOUND_S, about=cluster.num_running)
        return time.monotonic() - died_at_s

    def on_answer(num_ended: int) -> None:
        nonlocal num_rows_lost, replaced
        if replaced is None and num_ended >= NUM_CHATS // 2 and (num_rows := cluster.num_rows(victim)):
            died_at_s = time.monotonic()
            cluster.kill_node(victim.node_id)
            num_rows_lost = num_rows
            replaced = executor.submit(seconds_until_replaced, died_at_s)

    with (
        ThreadPoolExecutor(1) as executor,
        report.step(f"{NUM_CHATS} chats, a node with {', '.join(lost)} killed half-way"),
    ):
        disturbed = ask([over_http(port)], num_requests=NUM_CHATS, num_at_a_time=NUM_AT_A_TIME, on_answer=on_answer)
        report.note(str(disturbed))
        report.expect(num_rows_lost > 0, f"the node's decode service had requests when it died: {num_rows_lost}")
        _expect_no_failure(disturbed, report)
        assert replaced is not None
        report.note(f"what the node had runs elsewhere {replaced.result():.1f} s after its death")
    with report.step(f"the same {NUM_CHATS} chats, undisturbed"):
        quiet = ask([over_http(port)], num_requests=NUM_CHATS, num_at_a_time=NUM_AT_A_TIME)
        report.note(str(quiet))
        _expect_no_failure(quiet, report)
        different = answered_differently(disturbed, quiet)
        report.expect(not different, f"the answers are the same: {different or 'all'}")
    with report.step("a node added for the one that was lost"):
        cluster.add_node()


def _scale(cluster: RayCluster, port: int, report: Report) -> None:
    outcomes: list[Outcome] = []

    def chat_until(ended: threading.Event, num_at_a_time: int, num_fillings: int, first: int) -> None:
        chat, rounds = over_http(port, num_fillings=num_fillings), 0
        while not ended.is_set():
            number = first + rounds * num_at_a_time
            outcomes.append(ask([chat], num_requests=num_at_a_time, num_at_a_time=num_at_a_time, first=number))
            rounds += 1

    for title, number, num_at_a_time, num_fillings, first in (
        (f"{NUM_WHILE_GROWING} chats at a time until there are 3 of each", 3, NUM_WHILE_GROWING, LONG, 1000),
        ("1 chat at a time until there are 2 of each", 2, 1, 4, 100_000),
    ):
        ended = threading.Event()
        with report.step(title), ThreadPoolExecutor(1) as executor:
            chatting = executor.submit(chat_until, ended, num_at_a_time, num_fillings, first)
            try:
                for kind, seconds in _seconds_until(cluster, number).items():
                    report.note(f"{kind}: {number} replicas after {seconds:.1f} s")
            finally:
                ended.set()
            chatting.result()
            report.note("; ".join(map(str, outcomes[-3:])))
    for outcome in outcomes:
        _expect_no_failure(outcome, report, quietly=True)


def _seconds_until(cluster: RayCluster, number: int) -> Mapping[str, float]:
    """Waits until so many replicas of each service run. Returns how long it took for each."""
    began_s, seconds = time.monotonic(), dict[str, float]()

    def all_do() -> bool:
        running = cluster.num_running()
        seconds.update({k: time.monotonic() - began_s for k in KINDS if k not in seconds and running[k] == number})
        return len(seconds) == len(KINDS)

    wait_until(all_do, timeout_s=BOUND_S, about=cluster.num_running)
    return seconds


def _gateway(cluster: RayCluster, port: int, report: Report) -> None:
    with report.step("what the gateway says passes Serve's proxy"):
        status, headers, body = _post(port, {"model": "demo", "messages": []})
        report.expect(status == 400 and "error" in json.loads(body), f"a bad request is told so: {status}")
        report.expect(
            len([name for name, _ in headers if name.lower() == "x-request-id"]) == 1, "one request id is told"
        )
        status, _, body = _post(port, {"model": "demo", "messages": "x" * (5 << 20)})
        report.expect(status == 413, f"a request that is too large is refused: {status}")
    with report.step("a client that hangs up leaves nothing behind"):
        connection, response = _open_stream(port)
        response.read1(64)
        report.note(f"requests in rows: {_num_rows(cluster)}")
        report.expect(_num_rows(cluster) > 0, "its request is in a row")
        response.close()
        connection.close()
        wait_until(lambda: _num_rows(cluster) == 0, timeout_s=30.0, about=lambda: _num_rows(cluster))
    with report.step("a gateway process that dies cuts its streams off, and is replaced"):
        connection, response = _open_stream(port)
        response.read1(64)
        (replica,) = [each for each in cluster.replicas() if each.deployment == "gateway"]
        (process,) = psutil.Process(replica.pid).children()
        os.kill(process.pid, signal.SIGKILL)
        try:
            rest = response.read()
            report.problem(f"the stream looks whole: {rest[-200:]!r}")
        except (http.client.IncompleteRead, OSError) as error:
            report.note(f"the client sees {type(error).__name__}")
        connection.close()
        wait_until(lambda: _is_ready(port), timeout_s=BOUND_S, about=cluster.num_running)


def _ranks(cluster: RayCluster, port: int, directory: Path, report: Report) -> None:
    config = _config(port)
    (application,) = config["applications"]
    application["args"]["decode"]["tensor_parallel"] = 2
    prefill, _, gateway = application["deployments"]
    del prefill["autoscaling_config"]
    application["deployments"] = [prefill, gateway]  # decode as the application has it
    with report.step("a decode service of two ranks"):
        cluster.stop_serving()
        cluster.serve(config, directory)
        wait_until(lambda: _is_ready(port), timeout_s=BOUND_S, about=cluster.num_running)
        report.expect(
            cluster.placement_groups() == [[{"CPU": 2.0}]], f"it has one placement group: {cluster.placement_groups()}"
        )
        (replica,) = [each for each in cluster.replicas() if each.deployment == "decode"]
        report.expect('"num_threads": 2,' in cluster.log(replica), "it computes on the two CPUs of its bundle")
        outcome = ask([over_http(port)], num_requests=4, num_at_a_time=4)
        report.note(str(outcome))
        _expect_no_failure(outcome, report)


def _expect_no_failure(outcome: Outcome, report: Report, *, quietly: bool = False) -> None:
    if outcome.failures or not quietly:
        report.expect(not outcome.failures, f"no chat failed: {outcome.failures[:3] or 'none'}")


def _num_rows(cluster: RayCluster) -> int:
    return sum(cluster.num_rows(each) for each in cluster.replicas() if each.deployment == "decode")


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _post(port: int, body: Mapping[str, Any]) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json", "X-Request-Id": "a"}
        )
        response = connection.getresponse()
        return response.status, response.getheaders(), response.read()
    finally:
        connection.close()


def _open_stream(port: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Asks for a long answer as a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    body = {"model": "demo", "prompt": "Once", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


if __name__ == "__main__":
    sys.exit(main())
