"""Runs either service as users start it, but with the faults of a plan.

    python -m tests.faults.prefill_service --faults plan.json [settings]

The points of the plan are wrapped before the service starts; without a plan nothing is wrapped. Each fault that happens
is logged as event `fault`. The `fault_visits` log lines add up to more than half of a point's visits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch

from common.config.settings import ServiceSettings
from common.kv.pool import KvPool, RowLease
from common.service.process import Process, Serve, run_service
from common.wire.codec_frames import FrameCodec
from common.wire.framing import FramePayload
from common.wire.handoff import Frame, WriteKv
from tests.faults.device import HOST_MEMORY, FaultyDevice
from tests.faults.frames import COMMAND, FRAME, FaultyContext
from tests.faults.injector import Injector
from tests.faults.plan import Action, Fault, FaultPlan
from tests.faults.shared_memory import disturb_shared_memory

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)
RECEIVED, RESERVE = "handoff.received", "pool.reserve"
_FLAG = "--faults="
FIRST_COMMAND_TIMEOUT_S = 2.0
"""Less than the service's own limit of 10 s, so that a storm waits less for calls whose first command was dropped."""

_log = structlog.get_logger(__name__)


def run_with_faults(
    program: str, kind: type[SettingsT], import_serve: Callable[[], Serve[SettingsT]], argv: list[str]
) -> int:
    """Runs a service as `run_service` does, with the plan that `--faults=FILE` names in `argv`."""
    paths = [argument.removeprefix(_FLAG) for argument in argv if argument.startswith(_FLAG)]
    plan = FaultPlan.read(Path(paths[-1])) if paths else FaultPlan()
    injector = Injector(plan, _announce, _count)

    def import_faulty_serve() -> Serve[SettingsT]:
        serve = import_serve()
        _disturb_pool(injector)
        _disturb_received(injector)
        disturb_shared_memory(injector)
        _disturb_payloads(injector)
        if program == "prefill_service":
            _disturb_calls(injector)
            _await_commands_briefly()

        async def faulty_serve(settings: SettingsT, process: Process) -> None:
            device = FaultyDevice(process.runtime.device, injector)
            await serve(settings, replace(process, runtime=replace(process.runtime, device=device)))

        return faulty_serve

    return run_service(program, kind, import_faulty_serve, [item for item in argv if not item.startswith(_FLAG)])


def _announce(fault: Fault, visit: int) -> None:
    _log.warning("fault", point=fault.point, action=fault.action.value, visit=visit)
    if fault.action is Action.KILL:
        sys.stderr.flush()


def _count(point: str, num_visits: int) -> None:
    _log.info("fault_visits", point=point, num_visits=num_visits)


def _disturb_pool(injector: Injector) -> None:
    reserve = KvPool.reserve

    def faulty_reserve(self: KvPool, num_tokens: int, **options: Any) -> RowLease | None:
        return None if injector.visit(RESERVE) is not None else reserve(self, num_tokens, **options)

    if injector.watches(RESERVE):
        KvPool.reserve = faulty_reserve  # type: ignore[method-assign]


def _disturb_payloads(injector: Injector) -> None:
    """Injects failures into allocations of host memory for outgoing KV. They do not go through the device."""
    made = FramePayload.__init__

    def faulty(self: FramePayload, num_bytes: int, write: WriteKv) -> None:
        if injector.visit(HOST_MEMORY) is not None:
            raise torch.OutOfMemoryError(f"injected at {HOST_MEMORY}")
        made(self, num_bytes, write)

    if injector.watches(HOST_MEMORY):
        FramePayload.__init__ = faulty  # type: ignore[method-assign]


def _disturb_received(injector: Injector) -> None:
    decode = FrameCodec.decode

    def faulty_decode(self: FrameCodec, data: bytes, rows: Any, pool: Any = None) -> Frame:
        fault = injector.visit(RECEIVED)
        return decode(self, data if fault is None else injector.damage(fault, data), rows, pool)

    if injector.watches(RECEIVED):
        FrameCodec.decode = faulty_decode  # type: ignore[method-assign]


def _await_commands_briefly() -> None:
    """Makes a prefill service give up a call whose first command was dropped after FIRST_COMMAND_TIMEOUT_S."""
    from prefill_service import main

    limits = partial(main.HandoffLimits, first_command_timeout_s=FIRST_COMMAND_TIMEOUT_S)
    main.HandoffLimits = limits  # type: ignore[misc,assignment]


def _disturb_calls(injector: Injector) -> None:
    from prefill_service.edge.servicer import PrefillServicer

    handoff = PrefillServicer.handoff

    async def faulty_handoff(self: PrefillServicer, requests: Any, context: Any) -> None:
        faulty = FaultyContext(context, injector)
        await handoff(self, requests, faulty)  # type: ignore[arg-type]
        await faulty.end()

    if injector.watches(FRAME) or injector.watches(COMMAND):
        PrefillServicer.handoff = faulty_handoff  # type: ignore[method-assign]
