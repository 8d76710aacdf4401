"""A decode service with answers that a test writes beforehand."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

BOUND_S = 60.0


class ScriptedInference(inference_pb2_grpc.InferenceServicer):
    """An Inference service that plays the next of `scripts` for each Generate call, and `script` once none is left.

    A script is a list. Each entry is an event to send, a status that ends the call, or HOLD, which waits. `script` may
    also be a function that returns the script for a request. While it `hangs`, calls get no answer, not even its head.
    """

    HOLD = object()

    def __init__(self) -> None:
        self.scripts: deque[Sequence[Any]] = deque()
        self.script: Sequence[Any] | Callable[[inference_pb2.GenerateRequest], Sequence[Any]] = ()
        self.model = "demo"
        self.output_format = "hermes"
        self.has_reasoning = True
        self.template_variables = ["reasoning_effort"]
        self.requests: queue.Queue[inference_pb2.GenerateRequest] = queue.Queue()
        self.texts: queue.Queue[inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest] = queue.Queue()
        self.deadlines_s: queue.Queue[float | None] = queue.Queue()
        self.metadata: queue.Queue[dict[str, Any]] = queue.Queue()
        self.call_ended = threading.Event()
        self.ended_calls: queue.Queue[None] = queue.Queue()
        self.hangs = False
        self.tokenizing_s = 0.0
        self.refusals: Iterator[status_pb2.Status] = iter(())  # of the next calls of Tokenize
        self.is_tokenizing = threading.Event()
        self.unanswered: queue.Queue[str] = queue.Queue()  # names of methods

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.GenerateEvent]:
        self.requests.put(request)
        self.deadlines_s.put(context.time_remaining())
        self.metadata.put(dict(context.invocation_metadata()))
        has_ended = threading.Event()

        def on_end() -> None:
            has_ended.set()
            self.call_ended.set()
            self.ended_calls.put(None)

        _when_ended(context, on_end)
        script = self.script(request) if callable(self.script) else self.script
        self._answer("Generate", context)
        for item in self.scripts.popleft() if self.scripts else script:
            if item is self.HOLD:
                has_ended.wait(BOUND_S)
            elif isinstance(item, inference_pb2.GenerateEvent):
                yield item
            else:
                context.abort_with_status(rpc_status.to_status(item))

    def GetModelInfo(self, request: Any, context: Any) -> inference_pb2.GetModelInfoResponse:
        group = types_pb2.LayerGroup(
            name="target", num_layers=30, num_planes=2, num_heads=3, head_dim=64, dtype="bfloat16"
        )
        return inference_pb2.GetModelInfoResponse(
            model=self.model,
            architecture="LlamaForCausalLM",
            vocab_size=49152,
            max_context_tokens=8192,
            eos_token_ids=[2],
            device="cpu",
            dtype="bfloat16",
            version="0.1.0",
            fingerprint=types_pb2.Fingerprint(layer_groups=[group]),
            output_format=self.output_format,
            has_reasoning=self.has_reasoning,
            chat_template_variables=self.template_variables,
        )

    def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        self.texts.put(request)
        return inference_pb2.DetokenizeResponse(text="a")

    def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        self.texts.put(request)
        self._answer("Tokenize", context)
        if (refusal := next(self.refusals, None)) is not None:
            context.abort_with_status(rpc_status.to_status(refusal))
        self.is_tokenizing.set()
        ended = threading.Event()
        _when_ended(context, ended.set)
        if ended.wait(self.tokenizing_s):
            self.ended_calls.put(None)
        return inference_pb2.TokenizeResponse(token_ids=[1])

    def GetLoad(self, request: Any, context: Any) -> inference_pb2.GetInferenceLoadResponse:
        self._answer("GetLoad", context)
        return inference_pb2.GetInferenceLoadResponse(
            instance_id="first",
            rows=types_pb2.PoolLoad(total=4, free=1, reserved=1, transferring=1, running=1),
            slots=types_pb2.PoolLoad(total=64, free=60, quarantined=4),
            num_running=1,
            prefill_replicas=[
                inference_pb2.PrefillReplica(address="127.0.0.1:1", reason="connection refused", num_known_tokens=7)
            ],
            num_row_retries=3,
            is_degraded=True,
        )

    def _answer(self, method: str, context: Any) -> None:
        if self.hangs:
            has_ended = threading.Event()
            self.unanswered.put(method)
            _when_ended(context, has_ended.set)
            has_ended.wait(BOUND_S)
        else:
            context.send_initial_metadata(())


def _when_ended(context: Any, then: Callable[[], None]) -> None:
    """Calls `then` when the call ends, or now if it has ended: a test may end it as soon as it is told of it."""
    if not context.add_callback(then):
        then()


class ScriptedServer:
    """A gRPC server on loopback for `inference`, with health checks. It listens on `port`, or on a free one."""

    def __init__(
        self, credentials: grpc.ServerCredentials | None = None, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.inference = ScriptedInference()
        self.health = health.HealthServicer()
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        inference_pb2_grpc.add_InferenceServicer_to_server(self.inference, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        port = (
            self._server.add_insecure_port(f"{host}:{port}")
            if credentials is None
            else self._server.add_secure_port(f"{host}:{port}", credentials)
        )
        self.address = f"{host}:{port}"
        self.health.set("baton.v1.Inference", health_pb2.HealthCheckResponse.NOT_SERVING)
        self._server.start()

    def become_ready(self) -> None:
        self.health.set("baton.v1.Inference", health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> None:
        self._server.stop(grace=0).wait(BOUND_S)


def started(request_id: str = "r1", num_prompt_tokens: int = 3, seed: int = 7) -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(
        started=inference_pb2.Started(request_id=request_id, num_prompt_tokens=num_prompt_tokens, seed=seed)
    )


def delta(
    token_ids: Sequence[int], text: str, logprobs: Sequence[types_pb2.PositionLogprobs] = ()
) -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(delta=inference_pb2.Delta(token_ids=token_ids, text=text, logprobs=logprobs))


def finished(
    reason: inference_pb2.FinishReason.ValueType = inference_pb2.FINISH_REASON_LENGTH,
    num_completion_tokens: int = 0,
    num_cached_tokens: int = 0,
    **matched_stop: Any,
) -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(
        finished=inference_pb2.Finished(
            reason=reason,
            usage=inference_pb2.Usage(num_prompt_tokens=3, num_completion_tokens=num_completion_tokens),
            timings=inference_pb2.Timings(
                queue_s=0.25,
                prefill_s=0.5,
                transfer_s=0.125,
                kv_bytes=1000,
                num_handoff_attempts=1,
                num_cached_tokens=num_cached_tokens,
            ),
            **matched_stop,
        )
    )


def failure(code: int, message: str, *, reason: str = "", **metadata: str) -> status_pb2.Status:
    """Returns an error status. With a reason, it carries google.rpc.ErrorInfo."""
    status = status_pb2.Status(code=code, message=message)
    if reason:
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="baton", metadata=metadata))
        status.details.append(detail)
    return status


def prompt_tokens(start: int, *tokens: tuple[int, bytes, float | None]) -> inference_pb2.GenerateEvent:
    """Returns an event with tokens of the prompt, each given as (id, bytes, log-probability or None)."""
    return inference_pb2.GenerateEvent(
        prompt_logprobs=inference_pb2.PromptLogprobs(
            start=start,
            tokens=[
                inference_pb2.PromptToken(token_id=token_id, token=token)
                if logprob is None
                else inference_pb2.PromptToken(token_id=token_id, token=token, logprob=logprob, rank=2)
                for token_id, token, logprob in tokens
            ],
        )
    )
