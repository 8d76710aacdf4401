"""The `baton role` command: shows the role of a service, prefill or decode, or changes it."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli import options
from baton.cli.output import print_json, reported_errors
from baton.client import Tls
from baton.roles import START_TIMEOUT_S, Role, RoleChange, RoleClient, RoleState


def role(
    address: options.ServiceAddress,
    wanted: Annotated[
        Role | None, typer.Argument(metavar="[prefill|decode]", help="What it is to be; none: only show.")
    ] = None,
    start_timeout_s: Annotated[
        float, typer.Option(min=0.0, help="How long to wait for it, after its grace period.")
    ] = START_TIMEOUT_S,
    tls: Tls | None = None,
    token_file: options.TokenFile = None,
    other_token_file: options.OtherTokenFile = None,
    as_json: options.Json = False,
) -> None:
    """Show whether a service is a prefill or a decode service, or make it the other."""
    token, other_token = options.read_token(token_file), options.read_token(other_token_file)
    with reported_errors(as_json), RoleClient(address, tls=tls, token=token, other_token=other_token) as client:
        if wanted is None:
            state = client.state()
            print_json("role", address=address, state=state) if as_json else print(_state_text(address, state))
        else:
            change = client.change(wanted, start_timeout_s=start_timeout_s)
            print_json("role_change", address=address, change=change) if as_json else print(_text(address, change))


def _state_text(address: str, state: RoleState) -> str:
    doing = f", changing to {state.changing_to}" if state.changing_to else ""
    ready = "ready" if state.is_ready else "not ready"
    others = [each for each in state.roles if each is not state.role]
    can = f"can be a {others[0]} service" if others else "stays one: its setting other_role is not set"
    failed = f"; the last change failed: {state.last_failure}" if state.last_failure else ""
    return f"{address}: a {state.role} service, {ready}{doing}; {can}{failed}"


def _text(address: str, change: RoleChange) -> str:
    role = change.after.role
    if not change.seconds:
        return f"{address}: is a {role} service already"
    back = f"baton role --address {address} {change.before}"
    return f"{address}: {change.before} -> {role} in {change.seconds:.1f} s; back: {back}"
