"""The entry point of the gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from opentelemetry.trace import Tracer

from common.config.settings import GatewaySettings
from common.rpc.event_loop import run
from common.service.program import run_program, termination_signals
from common.telemetry.tracing import process_tracer
from gateway.server import GatewayServer

PROGRAM = "gateway"

_log = structlog.get_logger(__name__)


def run_gateway(argv: Sequence[str]) -> int:
    """Runs the gateway until SIGTERM or SIGINT. Returns the process's exit status."""
    return run_program(PROGRAM, GatewaySettings, argv, _serve_traced)


def _serve_traced(settings: GatewaySettings, instance_id: str) -> None:
    with process_tracer(settings, service=PROGRAM, instance_id=instance_id) as tracer:
        run(serve(settings, tracer))


async def serve(settings: GatewaySettings, tracer: Tracer) -> None:
    """Serves until SIGTERM or SIGINT, then finishes open requests within the grace period."""
    server = GatewayServer(settings, tracer=tracer)
    terminated = asyncio.Event()
    with termination_signals(terminated.set):
        port = await server.start()
        _log.info("serving", port=port)
        await terminated.wait()
        await server.drain()
        await server.stop()
