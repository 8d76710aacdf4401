"""The answer of each API to an output that a test writes, without HTTP, and what a client makes of its stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.codec import event_from_wire
from baton.events import Started
from baton.v1.inference_pb2 import FINISH_REASON_EOS, FinishReason
from common.text.output_formats import HERMES, OutputFormat
from gateway.apis.api import Admitted, Api, Tally
from gateway.apis.chat import CHAT
from gateway.apis.messages import MESSAGES
from gateway.apis.responses import RESPONSES
from gateway.served_model import ModelCard
from tests.client.scripted_inference import delta, finished, started
from tests.gateway.parsing.transcripts import FUNCTIONS, Said

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT.path: {
        "messages": USER,
        "tools": [{"type": "function", "function": {"name": n, "parameters": each}} for n, each in FUNCTIONS.items()],
    },
    MESSAGES.path: {
        "max_tokens": 8,
        "messages": USER,
        "tools": [{"name": name, "input_schema": each} for name, each in FUNCTIONS.items()],
    },
    RESPONSES.path: {
        "input": "hi",
        "tools": [{"type": "function", "name": name, "parameters": each} for name, each in FUNCTIONS.items()],
    },
}


def answered(
    api: Api,
    pieces: Sequence[str],
    *,
    form: OutputFormat = HERMES,
    is_open: bool = False,
    reason: FinishReason.ValueType = FINISH_REASON_EOS,
    **fields: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the answer that an output in these pieces becomes, and the events of its stream, all as JSON."""
    first = started()
    first.started.is_reasoning_open = is_open
    deltas = [delta([place], piece) for place, piece in enumerate(pieces)]
    begun, *events = [event_from_wire(each) for each in (first, *deltas, finished(reason))]
    assert isinstance(begun, Started)
    card = ModelCard(
        names=("demo",),
        system_fingerprint="",
        max_context_tokens=64,
        output_format=form,
        template_variables=frozenset(),
        tokenizer={},
        created=0,
    )
    made: list[Any] = []
    for stream in (False, True):
        plan = api.parse(json.dumps({"model": "demo", **BODIES[api.path], **fields, "stream": stream}).encode())
        tally = Tally(plan, [begun])
        answer = api.begin(Admitted(plan=plan, card=card, request_id="r", created_s=0, started=[begun], tally=tally))
        sent = list(answer.opening())
        for event in events:
            tally.add(0, event)
            sent += answer.add(0, event)
        if stream:
            sent += answer.ending()
            made.append([each.data for each in sent if each.data != "[DONE]"])
        else:
            made.append(answer.whole())
    whole, streamed = json.loads(json.dumps(made, allow_nan=False))
    return whole, streamed


def chat_of(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the answer that a client puts together from the chunks of a chat."""
    message: dict[str, Any] = {}
    choices = [chunk["choices"][0] for chunk in chunks]
    for each in (choice["delta"] for choice in choices):
        for name in ("content", "reasoning_content"):
            if each.get(name):
                message[name] = message.get(name, "") + each[name]
        assert each.get("reasoning") == each.get("reasoning_content"), "two names of one thing"
        for call in each.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert call["index"] == len(calls) - 1
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    assert {choice["finish_reason"] for choice in choices[:-1]} <= {None}
    return {"choices": [{"message": message, "finish_reason": choices[-1]["finish_reason"]}]}


def chat_said(answer: Mapping[str, Any]) -> tuple[Said, str]:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = tuple((each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ()))
    said = Said(message.get("reasoning_content", ""), message.get("content") or "", calls)
    return said, choice["finish_reason"]


def message_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the message that a client makes of a stream's events."""
    first, *others, last = [event for event in events if event["type"] != "ping"]
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    message = dict(first["message"])
    content: list[Any] = message["content"]
    is_open = False
    for event in others:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(content) and not is_open
                content.append(dict(block))
                is_open = True
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind, **part}}:
                assert index == len(content) - 1 and is_open
                ((name, value),) = part.items()
                if kind == "input_json_delta":
                    content[-1]["input"] = json.loads(value)
                else:
                    assert value and kind == f"{name}_delta"
                    content[-1][name] += value
            case {"type": "content_block_stop", "index": index}:
                assert index == len(content) - 1 and is_open
                is_open = False
            case {"type": "message_delta", "delta": end, "usage": usage}:
                assert not is_open and message["stop_reason"] is None
                message |= {**end, "usage": usage}
            case _:
                raise AssertionError(event)
    return message


def joined(message: Mapping[str, Any], kind: str) -> str:
    return "\n".join(block[kind] for block in message["content"] if block["type"] == kind)


def message_said(message: Mapping[str, Any]) -> tuple[Said, str]:
    """The input of a call is an object here. It is compared as json.dumps writes it."""
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert len({call["id"] for call in calls}) == len(calls)
    said = tuple((call["name"], json.dumps(call["input"])) for call in calls)
    return Said(joined(message, "thinking"), joined(message, "text"), said), message["stop_reason"]


def response_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the last event's response. Checks that the events before it add up to its items."""
    items: list[Any] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append("")
            case kind if kind.endswith(".delta"):
                assert event["output_index"] == len(items) - 1
                items[-1] += event["delta"]
            case "output_item.done":
                assert items[-1] == written(event["item"])
                items[-1] = event["item"]
    response = dict(events[-1]["response"])
    assert response["output"] == items
    return response


def written(item: Mapping[str, Any]) -> str:
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def response_said(response: Mapping[str, Any]) -> tuple[Said, str]:
    texts = {
        kind: "\n".join(written(item) for item in response["output"] if item["type"] == kind)
        for kind in ("reasoning", "message")
    }
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    assert len({call["call_id"] for call in calls}) == len(calls)
    said = Said(*texts.values(), tuple((call["name"], call["arguments"]) for call in calls))
    return said, response["status"]
