"""Builders for the engines of all suites. Each engine is small by default, and the test steps it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import torch

from common.device.factory import open_device
from common.device.stream import Device
from common.engine import EngineConfig, EngineParts, EventT, Outbox
from common.kv.pool_size import PoolSize
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from common.service.cpu_engine import cpu_engine
from common.wire.handoff import HandoffRow, KvSegment, PrebuiltBatch, RowFailed
from decode_service.schedule.config import DecodeConfig
from decode_service.schedule.scheduler import DecodeEngine
from prefill_service.messages import CallDone, Command, Event, FrameReady, OpenCall
from prefill_service.schedule.config import PrefillConfig
from prefill_service.schedule.scheduler import PrefillEngine

ConfigT = TypeVar("ConfigT", bound=EngineConfig)

SMALL: dict[str, Any] = {"max_rows": 4, "max_kv_tokens": 64, "max_context_tokens": 64, "debug_checks": True}
"""Sizes of a small engine, so that a test can reach its limits."""


def cpu_device() -> Device:
    """Returns a device whose streams are threads. The engine that gets it also closes it."""
    return open_device("cpu", num_threads=1)


class Received(Outbox[EventT]):
    """An outbox that keeps the events of an engine until the test takes them."""

    def __init__(self) -> None:
        self._received: list[EventT] = []
        super().__init__(self._received.extend)

    def take(self) -> list[EventT]:
        """Returns the events posted since the last call, also those that the engine holds back until its next step."""
        self.hand_over()
        received = list(self._received)
        self._received.clear()
        return received


def new_decode_engine(model: object, device: Device | None = None, **options: Any) -> DecodeEngine:
    """Returns a decode engine with the sizes in `SMALL`, which `options` override: fields of its config, its size and
    its parts, or arguments. Without a device it gets a CPU device of its own. Without an outbox nobody gets its events.

    `model` is a TargetModel or a stand-in for one.
    """
    engine = cpu_engine(torch.device("cpu") if device is None else device.torch_device)
    if engine is not None:
        options.setdefault("copy_kv", engine.kv_copy())
    options.setdefault("outbox", Outbox(lambda events: None))
    return DecodeEngine(*_values(DecodeConfig, model, device, options), **options)


def new_prefill_engine(model: object, device: Device | None = None, **options: Any) -> PrefillEngine:
    """Returns a prefill engine with the sizes in `SMALL`, which `options` override: fields of its config, its size and
    its parts, or arguments. Without a device it gets a CPU device of its own. Without an outbox nobody gets its events.
    """
    options.setdefault("outbox", Outbox(lambda events: None))
    return PrefillEngine(*_values(PrefillConfig, model, device, options), **options)


def _values(
    kind: type[ConfigT], model: object, device: Device | None, options: dict[str, Any]
) -> tuple[ConfigT, PoolSize, EngineParts]:
    """Takes the fields of config, size and parts out of `options`, and returns these values."""
    for name, value in SMALL.items():
        options.setdefault(name, value)
    if (draft := options.get("draft")) is not None and kind is DecodeConfig:
        options.setdefault("least_chunk_tokens", draft.layer_group.num_layers)
    config = kind(**_taken(kind, options))
    num_ahead = config.tokens_ahead if isinstance(config, DecodeConfig) else 0
    size = {"decided_by": "the test", **_taken(PoolSize, options)}
    size["max_context_tokens"] = min(size["max_context_tokens"], size["max_kv_tokens"] - num_ahead)
    size["max_window_tokens"] = size.get("max_window_tokens") or size["max_kv_tokens"]
    parts = {name: value for name, value in _taken(EngineParts, options).items() if value is not None}
    with_model = EngineParts(model=cast(TargetModel, model), device=device or cpu_device(), **parts)
    return config, PoolSize(**size), with_model


def _taken(kind: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    return {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}


class PrefillHalf:
    """A prefill engine without a decode side. The test opens its calls, steps it and keeps the frames it sends.

    It raises AssertionError for an event of a call that has ended.
    """

    def __init__(self, model: object, device: Device | None = None, **options: Any) -> None:
        self.engine = new_prefill_engine(model, device, outbox=Outbox(self.take), **options)
        self.frames: list[FrameReady] = []
        self.ended_calls: set[str] = set()

    def open(
        self,
        call_id: str,
        prompts: Collection[Sequence[int]],
        sampling: ResolvedSampling | None = None,
        *,
        shares_memory: bool = False,
        cache_salt: str | None = None,
        num_held: int = 0,
    ) -> None:
        """Opens a call with one row for each prompt, and steps once. The caller holds the first `num_held` tokens'
        KV.
        """
        held = tuple((name, num_held) for name in self.engine.pool.groups)
        rows = [replace(row, cache_salt=cache_salt, num_held_tokens=held) for row in handoff_rows(prompts, sampling)]
        self.step(OpenCall(call_id, tuple(rows), shares_memory=shares_memory))

    def step(self, *commands: Command) -> None:
        self.engine.step(commands)

    def take(self, events: Sequence[Event]) -> None:
        """Keeps the events that the engine hands over."""
        for event in events:
            assert event.call_id not in self.ended_calls, f"the call has ended, and then came {event}"
            if isinstance(event, FrameReady):
                self.frames.append(event)
            elif isinstance(event, CallDone):
                self.ended_calls.add(event.call_id)

    @property
    def is_empty(self) -> bool:
        """Whether no row is queued or held, and all bytes are sent."""
        load = self.engine.load()
        has_rows = load.num_queued or load.rows.free < load.rows.total or load.slots.held
        return not (has_rows or load.unsent_bytes)

    @property
    def segments(self) -> list[KvSegment]:
        return [ready.frame for ready in self.frames if isinstance(ready.frame, KvSegment)]

    @property
    def first_tokens(self) -> list[tuple[int, int]]:
        """(row, first token) of each row whose first token has come, in the order of arrival."""
        return [
            (row, token)
            for ready in self.frames
            if isinstance(ready.frame, PrebuiltBatch)
            for row, token in zip(ready.frame.rows.tolist(), ready.frame.first_token_ids.tolist(), strict=True)
        ]

    @property
    def failures(self) -> list[RowFailed]:
        return [ready.frame for ready in self.frames if isinstance(ready.frame, RowFailed)]

    def close(self) -> None:
        self.engine.close()


def handoff_rows(
    prompts: Collection[Sequence[int]], sampling: ResolvedSampling | None = None
) -> tuple[HandoffRow, ...]:
    """Returns one handoff row for each prompt. Its request id is the prompt's index."""
    sampling = sampling or ResolvedSampling(seed=1, max_tokens=4)
    return tuple(HandoffRow(str(i), 0, tuple(ids), len(ids), sampling) for i, ids in enumerate(prompts))
