"""A client that reads a prefill service's load. Generation requests reach that service only
through a decode service.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import grpc

from baton.client.channel import ChannelOptions, Tls, authorized, channel_options, single_server
from baton.client.generation import bounded_s
from baton.client.interrupts import uninterrupted
from baton.codec import prefill_load_from_wire
from baton.errors import error_from_rpc
from baton.server_info import PrefillLoad
from baton.v1 import prefill_pb2, prefill_pb2_grpc


class PrefillClient:
    """Reads the load and health of one prefill service. `rpc_timeout_s` bounds every call; `token`
    is sent with each.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        rpc_timeout_s: float = 10.0,
        channel_overrides: ChannelOptions | None = None,
    ) -> None:
        self.address = address
        self._rpc_timeout_s = bounded_s("rpc_timeout_s", rpc_timeout_s)
        target, options = single_server(address), channel_options(tls, channel_overrides)
        self._channel = (
            grpc.insecure_channel(target, options)
            if tls is None
            else grpc.secure_channel(target, tls.credentials(), options)
        )
        self._prefill = prefill_pb2_grpc.PrefillStub(authorized(self._channel, token))

    @uninterrupted
    def load(self) -> PrefillLoad:
        try:
            return prefill_load_from_wire(
                self._prefill.GetLoad(prefill_pb2.GetPrefillLoadRequest(), timeout=self._rpc_timeout_s)
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    @uninterrupted
    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
