"""Tests that the error of an unknown call names the service that answers here, and the one that offers the call."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from baton import AsyncClient, errors
from tests.decode_edge.edge_under_test import running_edge
from tests.security.transports import looking_at
from tests.support.prefill_edge import running_prefill_edge


async def test_a_client_that_calls_a_prefill_service_is_told_who_serves_it() -> None:
    async with running_prefill_edge() as prefill, AsyncClient(prefill.address) as client:
        for call in (client.model_info(), client.load(), client.complete("Hi")):
            with pytest.raises(errors.Unimplemented) as refusal:
                await call
            assert refusal.value.reason == "NOT_SERVED"
            assert "this is the prefill service" in str(refusal.value)
            assert str(refusal.value).startswith("baton.v1.Inference is served by the decode service, at another")


async def test_a_decode_service_that_is_given_another_as_its_replica_says_so() -> None:
    async with running_edge([]) as edge:
        decode, transport = await looking_at(edge.address)
        replica = await asyncio.to_thread(decode.latest_replica, lambda each: "NOT_FOUND" in str(each.error))
        await transport.close()
    assert "'baton.v1.Prefill' is not here, baton.v1.Inference is" in str(replica.error)


@pytest.mark.parametrize(
    "method",
    [
        "/baton.v1.Prefill/Handoff",
        "/baton.v1.Inference/Nothing",
        "/x/y",
        "/baton.v9.Inference/Generate",
        "/" + "x" * 9000,
    ],
    ids=lambda method: method[:40],
)
async def test_every_other_call_is_told_what_is_served(method: str) -> None:
    async with running_edge([]) as edge, grpc.aio.insecure_channel(edge.address) as channel:
        for call in (
            channel.unary_unary(method)(b""),
            channel.unary_stream(method)(b""),
            channel.stream_stream(method)(),
        ):
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            words = await call.details()
            assert "this is the decode service, and serves baton.v1.Inference, grpc.health.v1.Health" in words
            assert len(words) < 512


async def test_a_caller_without_a_token_is_told_nothing() -> None:
    async with (
        running_edge([], tokens=("some-long-token",)) as edge,
        grpc.aio.insecure_channel(edge.address) as channel,
    ):
        assert await channel.unary_unary("/x/y")(b"").code() is grpc.StatusCode.UNAUTHENTICATED
