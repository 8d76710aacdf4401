"""Baton's client library: the names that users of a running prefill/decode pair import.

`Client` blocks, `AsyncClient` is for asyncio. Both yield the events of `baton.events` and raise the errors of
`baton.errors`.
"""

from baton.client import AsyncClient, Client, Tls
from baton.events import Completion, Delta, Event, Finished, FinishReason, Started
from common.grammar.reasoning import Reasoning
from common.text.chat_messages import ChatMessage, Tool, ToolCall, ToolChoice

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "Client",
    "Completion",
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "Reasoning",
    "Started",
    "Tls",
    "Tool",
    "ToolCall",
    "ToolChoice",
]
