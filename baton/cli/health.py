"""The `baton health` command, for container health checks."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli import options
from baton.cli.output import print_json, reported_errors, text_console
from baton.client import Client, Tls
from baton.server_info import HealthStatus


def health(
    address: options.ServiceAddress,
    service: Annotated[
        str, typer.Option(help='"" asks whether it lives; baton.v1.Inference, baton.v1.Prefill whether it serves.')
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=0.0)] = 5.0,
    tls: Tls | None = None,
    as_json: options.Json = False,
) -> None:
    """Exit with 0 when the service serves, else with 1."""
    with reported_errors(as_json), Client(address, tls=tls, rpc_timeout_s=timeout_s) as client:
        status = client.health(service)
    if as_json:
        print_json("health", address=address, service=service, status=status)
    else:
        print(status.value)
        if status is HealthStatus.UNKNOWN_SERVICE:
            text_console().print(
                f"{address} does not serve {service!r}: a decode service serves baton.v1.Inference, a prefill service "
                "baton.v1.Prefill",
                style="red",
                markup=False,
            )
    if status is not HealthStatus.SERVING:
        raise typer.Exit(1)
