"""Server information that the clients offer: model, load and health."""

from __future__ import annotations

import inspect

import pytest

from baton import AsyncClient, Client, errors
from baton.client.channel import channel_options
from baton.codec import model_info_from_wire
from baton.server_info import HealthStatus, PrefillReplica
from baton.v1 import inference_pb2, types_pb2
from common.telemetry.stats import PoolCounts
from tests.client.either_client import EitherClient
from tests.client.scripted_inference import ScriptedServer


def test_model_info_counts_the_bytes_of_a_token(client: Client) -> None:
    info = client.model_info()
    assert (info.model, info.vocab_size, info.eos_token_ids) == ("demo", 49152, (2,))
    assert info.layer_groups == {"target": 30 * 2 * 3 * 64 * 2}
    assert (info.output_format, info.has_reasoning) == ("hermes", True)


def test_defaults_are_told_as_they_were_written() -> None:
    defaults = types_pb2.SamplingParams(temperature=0.2, top_p=0.9, top_k=40)
    told = model_info_from_wire(inference_pb2.GetModelInfoResponse(sampling_defaults=defaults)).sampling_defaults
    assert told == {"temperature": 0.2, "top_p": 0.9, "top_k": 40}


@pytest.mark.parametrize("part", ["config_digest", "target_weights_digest", "tokenizer_digest"])
def test_a_model_s_digest_is_of_all_that_makes_it(part: str) -> None:
    served = inference_pb2.GetModelInfoResponse(fingerprint=types_pb2.Fingerprint(target_weights_digest="a"))
    before = model_info_from_wire(served).digest
    setattr(served.fingerprint, part, "b")
    assert model_info_from_wire(served).digest != before


async def test_both_clients_say_the_same(client: Client, async_client: AsyncClient) -> None:
    assert await async_client.model_info() == client.model_info()
    assert await async_client.load() == client.load()


def test_load_counts_rows_by_state(client: Client) -> None:
    load = client.load()
    assert load.rows == PoolCounts(total=4, free=1, reserved=1, transferring=1, running=1)
    assert load.prefill_replicas == (PrefillReplica("127.0.0.1:1", False, 0, "connection refused", "", 7),)
    assert (load.instance_id, load.num_running, load.num_row_retries) == ("first", 1, 3)
    assert load.is_degraded


@pytest.mark.parametrize(
    ("service", "status"),
    [
        ("", HealthStatus.SERVING),
        ("baton.v1.Inference", HealthStatus.NOT_SERVING),
        ("baton.v1.Nothing", HealthStatus.UNKNOWN_SERVICE),
    ],
)
async def test_health_tells_life_from_readiness(either: EitherClient, service: str, status: HealthStatus) -> None:
    assert await either.call("health", service) is status


@pytest.mark.parametrize("call", ["health", "load", "model_info", "complete"])
async def test_a_server_that_is_gone_is_unavailable(server: ScriptedServer, either: EitherClient, call: str) -> None:
    server.stop()
    with pytest.raises(errors.Unavailable):
        await either.call(call, *(["Hi"] if call == "complete" else []))


def test_a_generation_notices_a_dead_server_while_it_may_resume() -> None:
    options = dict(channel_options(None, None))
    timeouts_ms = {int(options[name]) for name in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")}
    silence_ms = int(options["grpc.keepalive_time_ms"]) + max(timeouts_ms)  # gRPC ends a call at the later of the two
    resume_timeout_s = inspect.signature(Client).parameters["resume_timeout_s"].default
    assert silence_ms <= resume_timeout_s * 1000 / 2
    assert options["grpc.keepalive_permit_without_calls"] == 0
    assert 0 < int(options["grpc.max_receive_message_length"]) <= 64 * 1024 * 1024


def test_channel_options_can_be_overridden() -> None:
    assert dict(channel_options(None, {"grpc.enable_http_proxy": 1}))["grpc.enable_http_proxy"] == 1
