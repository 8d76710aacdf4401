"""The gRPC clients of the decode service, and a small client that reads a prefill service's load."""

from baton.client.asynchronous import AsyncClient, AsyncEventStream
from baton.client.blocking import Client, EventStream
from baton.client.channel import Tls
from baton.client.prefill import PrefillClient

__all__ = ["AsyncClient", "AsyncEventStream", "Client", "EventStream", "PrefillClient", "Tls"]
