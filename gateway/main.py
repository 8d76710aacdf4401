"""The life of the gateway's process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import structlog
from opentelemetry.trace import Tracer

from common.config.gateway_settings import GatewaySettings
from common.config.load import load_settings, log_format_asked
from common.host.descriptors import raise_descriptor_limit
from common.service.process_exit import EXIT_OK, exit_on_termination, exit_status_of, termination_signals
from common.telemetry.logs import configure_logs
from common.telemetry.tracing import process_tracer
from gateway.server import GatewayServer

PROGRAM = "gateway"

_log = structlog.get_logger(__name__)


def run_gateway(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status, as of a service."""
    with exit_on_termination():
        configure_logs("info", log_format_asked(argv), service=PROGRAM)
        try:
            settings = load_settings(GatewaySettings, argv, program=PROGRAM)
            instance_id = uuid.uuid4().hex
            configure_logs(settings.log_level, settings.log_format, service=PROGRAM, instance_id=instance_id)
            _log.info("config", **settings.model_dump(mode="json"))
            raise_descriptor_limit()
            with process_tracer(settings, service=PROGRAM, instance_id=instance_id) as tracer:
                asyncio.run(serve(settings, tracer))
        except Exception as error:
            return exit_status_of(error)
    _log.info("stopped")
    return EXIT_OK


async def serve(settings: GatewaySettings, tracer: Tracer) -> None:
    """Serve until SIGTERM or SIGINT, then finish open requests within the grace period."""
    server = GatewayServer(settings, tracer=tracer)
    with termination_signals() as terminated:
        port = await server.start()
        _log.info("serving", port=port)
        await terminated.wait()
        await server.drain()
        await server.stop()
