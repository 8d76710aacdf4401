"""Tests of field rule A12: the services' reflection and health are true, and enough to call the services."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton.client import Client
from baton.server_info import HealthStatus
from tests.support.running_pair import BOUND_S, RunningPair

SERVICES = {"decode": "baton.v1.Inference", "prefill": "baton.v1.Prefill"}


@pytest.fixture
def pair(plain_pair: RunningPair) -> RunningPair:
    return plain_pair


def address_of(pair: RunningPair, role: str) -> str:
    addresses = {"decode": pair.processes.decode_addresses, "prefill": pair.processes.prefill_addresses}
    return addresses[role][0]


@pytest.mark.parametrize("role", SERVICES)
def test_reflection_lists_the_services_and_health_knows_them(pair: RunningPair, role: str) -> None:
    with grpc.insecure_channel(address_of(pair, role)) as channel:
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    common = {
        "baton.v1.Roles",
        "baton.v1.Timeline",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert services == {SERVICES[role], *common}
    with Client(address_of(pair, role)) as client:
        assert client.health("") is HealthStatus.SERVING
        assert client.health(SERVICES[role]) is HealthStatus.SERVING
        assert client.health("baton.v1.Nonesuch") is HealthStatus.UNKNOWN_SERVICE


def test_a_request_can_be_made_from_reflected_descriptors_alone(pair: RunningPair) -> None:
    with grpc.insecure_channel(address_of(pair, "decode")) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service = pool.FindServiceByName("baton.v1.Inference")
        methods = {"Generate", "GetLoad", "GetModelInfo", "Tokenize", "Detokenize"}
        assert {method.name for method in service.methods} == methods
        method = service.FindMethodByName("Generate")
        request_class, event_class = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        generate = channel.unary_stream(
            f"/{service.full_name}/{method.name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=event_class.FromString,
        )
        request = request_class(text="the", sampling={"max_tokens": 5, "ignore_eos": True, "seed": 1})
        kinds = [event.WhichOneof("event") for event in generate(request, timeout=BOUND_S)]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert set(kinds[1:-1]) == {"delta"}
