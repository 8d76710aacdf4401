"""The decode service's transport to one prefill service, which tells a recorder what it sees of that service."""

from __future__ import annotations

from typing import Any

from decode_service.handoff.grpc_transport import GrpcTransport
from tests.handoff.homes import FAST
from tests.handoff.samples import FINGERPRINT, ROOMY_BUDGET_BYTES
from tests.handoff.scripted_prefill import RecordingDecode
from tests.wire.strategies import VOCAB_SIZE


async def looking_at(address: str, **options: Any) -> tuple[RecordingDecode, GrpcTransport]:
    """Opens a transport, which the caller closes. `options` are further arguments of GrpcTransport."""
    decode = RecordingDecode()
    transport = GrpcTransport(
        post=decode.post,
        addresses=[address],
        fingerprint=FINGERPRINT,
        vocab_size=VOCAB_SIZE,
        receive_budget_bytes=ROOMY_BUDGET_BYTES,
        timeouts=FAST,
        **options,
    )
    await transport.open()
    return decode, transport
