"""A service process without a model. It answers health checks and GetLoad. As a decode service it also answers
requests, with `max_tokens` tokens each.

Its misbehaviour is set by arguments or, since the real services have no such flags, by the variables FAKE_PREFILL and
FAKE_DECODE.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from tests.client.scripted_inference import ScriptedInference, delta, finished, started

ROWS = types_pb2.PoolLoad(total=4, free=4)
MISMATCH = inference_pb2.PrefillReplica(
    address="p:1", reason="fingerprints differ in dtype", error_reason="FINGERPRINT_MISMATCH"
)


class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    def Handoff(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def GetFingerprint(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def GetLoad(self, request: Any, context: Any) -> prefill_pb2.GetPrefillLoadResponse:
        return prefill_pb2.GetPrefillLoadResponse(instance_id=str(os.getpid()), rows=ROWS, slots=ROWS)


class FakeInference(ScriptedInference):
    """Answers each request with `token_ids`, or with tokens 0, 1, 2, ... if there are none. GetModelInfo returns the
    process's command line.
    """

    def __init__(self, token_ids: Sequence[int] = (), prefill_replicas: Sequence[Any] = ()) -> None:
        super().__init__()
        self._token_ids = token_ids
        self._prefill_replicas = prefill_replicas
        self.script = self._said

    def _said(self, request: inference_pb2.GenerateRequest) -> list[Any]:
        token_ids = self._token_ids or range(request.sampling.max_tokens or 3)
        deltas = [delta([token_id], f"{token_id} ") for token_id in token_ids]
        return [started(), *deltas, finished(num_completion_tokens=len(deltas))]

    def GetModelInfo(self, request: Any, context: Any) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(
            model=" ".join(sys.argv[1:]), vocab_size=1000, max_context_tokens=4096, version="0"
        )

    def GetLoad(self, request: Any, context: Any) -> inference_pb2.GetInferenceLoadResponse:
        return inference_pb2.GetInferenceLoadResponse(
            instance_id=str(os.getpid()), rows=ROWS, slots=ROWS, prefill_replicas=self._prefill_replicas
        )


class SecretMetrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401)


def main(ready_service: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--metrics-listen", default="")
    troubles = ["", "die", "loads", "never-ready", "mismatch", "ignore-sigterm", "secret-metrics"]
    parser.add_argument("--fake-trouble", choices=troubles, default="")
    parser.add_argument(
        "--fake-token-ids", type=lambda text: [int(token_id) for token_id in text.split(",")], default=()
    )
    told = os.environ.get("FAKE_PREFILL" if ready_service == "baton.v1.Prefill" else "FAKE_DECODE", "")
    options, _ = parser.parse_known_args([*sys.argv[1:], *told.split()])
    if options.fake_trouble == "die":
        print("first line\nno such model: nonesuch", flush=True)
        sys.exit(3)
    ended = threading.Event()
    signal.signal(
        signal.SIGTERM,
        signal.SIG_IGN if options.fake_trouble == "ignore-sigterm" else lambda number, frame: ended.set(),
    )
    if options.fake_trouble == "secret-metrics":
        host, _, port = options.metrics_listen.rpartition(":")
        metrics = HTTPServer((host, int(port)), SecretMetrics)
        threading.Thread(target=metrics.serve_forever, daemon=True).start()
    if options.fake_trouble == "loads":
        ended.wait()
        return
    server = grpc.server(ThreadPoolExecutor(8))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if options.fake_trouble in ("never-ready", "mismatch"):
        servicer.set(ready_service, health_pb2.HealthCheckResponse.NOT_SERVING)
    else:
        servicer.set(ready_service, health_pb2.HealthCheckResponse.SERVING)
    replicas = [MISMATCH] if options.fake_trouble == "mismatch" else []
    inference_pb2_grpc.add_InferenceServicer_to_server(FakeInference(options.fake_token_ids, replicas), server)
    prefill_pb2_grpc.add_PrefillServicer_to_server(FakePrefill(), server)
    server.add_insecure_port(options.listen)
    server.start()
    while not ended.wait(1.0):
        pass
    print("drained", flush=True)
    server.stop(grace=0).wait(5.0)
