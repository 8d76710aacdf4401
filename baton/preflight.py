"""Checks a pair's settings before any of its processes starts.

It needs the services' libraries, so commands that start a pair import it only when they run.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from baton.errors import InvalidArgument, invalid_field
from baton.local_pair import LocalPair
from baton.service_process import TLS_SETTINGS, ServiceProcess
from common.addresses import why_not_listen
from common.checkpoints.cache import OnProgress
from common.checkpoints.source import check_draft, check_model, resolve_draft, resolve_model
from common.config.load import SettingsT, load_settings
from common.config.settings import DecodeSettings, GatewaySettings, PrefillSettings, ServiceSettings
from common.errors import ConfigError

_ALIKE = ("dtype", "kv_dtype", "draft_topk")
"""Settings that must be equal on both kinds of service for every model."""
_PLAIN = ("tls_cert", "tls_ca", "prefill_tls")


@dataclass(frozen=True, slots=True)
class PairSettings:
    """The final settings of a pair's services, combined from flags, environment, files and defaults."""

    prefill: PrefillSettings
    decode: DecodeSettings


def check_pair(pair: LocalPair) -> PairSettings:
    """Checks settings, ports and devices, and returns the settings of both kinds of service.

    Finds errors that would otherwise appear only in running processes. Raises InvalidArgument, which names the setting,
    and StartupError for a wrong `model` or `draft`. Fetches nothing, and imports no model library.
    """
    prefill = _settings(PrefillSettings, pair.prefill[0])
    decode = _settings(DecodeSettings, pair.decode[0])
    gateway = None if pair.gateway is None else _settings(GatewaySettings, pair.gateway)
    if decode.prefill != pair.prefill_addresses:
        raise invalid_field("prefill", "which prefill services there are is said by how many are started")
    _check_agreement(prefill, decode)
    _check_tokens(prefill, decode, gateway)
    _check_memory(prefill, len(pair.prefill), decode, len(pair.decode))
    for settings in (prefill, decode):
        check_model(settings.model)
        if settings.draft:
            check_draft(settings.draft)
        _check_device(settings.device)
    _check_ports(pair, prefill, decode)
    return PairSettings(prefill, decode)


def fetch_models(settings: PairSettings, progress: OnProgress) -> None:
    """Fetches the models and draft heads that the services will load. Raises StartupError if that fails."""
    for model, dtype in {(each.model, each.dtype) for each in (settings.prefill, settings.decode)}:
        resolve_model(model, progress, dtype=dtype)
    for draft in {settings.prefill.draft, settings.decode.draft} - {""}:
        resolve_draft(draft, progress)


def _settings(kind: type[SettingsT], process: ServiceProcess) -> SettingsT:
    module, arguments = process.arguments[1], process.arguments[2:]
    try:
        settings = load_settings(kind, arguments, program=module, without=TLS_SETTINGS)
    except ConfigError as error:
        raise InvalidArgument(f"{process.role}: {error}", reason="INVALID_FIELD") from error
    if settings.listen != process.address:
        raise invalid_field("listen", f"{process.role} services started here listen where they are told to by the pair")
    for name in _PLAIN:
        if getattr(settings, name, None):
            raise invalid_field(name, "the services of a pair that is started here speak in plain, on loopback")
    return settings


def _check_agreement(prefill: PrefillSettings, decode: DecodeSettings) -> None:
    """Raises InvalidArgument if the two kinds of service have settings that cannot agree.

    Model names are not compared, because two names may mean the same model.
    """
    if bool(prefill.draft) != bool(decode.draft):
        raise _differ("draft", prefill.draft or "none", decode.draft or "none")
    for name in _ALIKE:
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours != theirs:
            raise _differ(name, ours, theirs)


def _differ(name: str, prefill: object, decode: object) -> InvalidArgument:
    flag = f"--{name.replace('_', '-')}"
    remedy = f"give {flag} alike to both kinds of service, or set BATON_{name.upper()}"
    return invalid_field(name, f"prefill has {prefill}, decode has {decode}: {remedy}")


def _check_tokens(prefill: PrefillSettings, decode: DecodeSettings, gateway: GatewaySettings | None) -> None:
    if prefill.auth_token_file and not decode.prefill_token_file:
        raise invalid_field(
            "prefill_token_file", "the prefill services want a token, and decode services have none to show"
        )
    if gateway and decode.auth_token_file and not gateway.decode_token_file:
        raise invalid_field("decode_token_file", "the decode services want a token, and the gateway has none to show")


def _check_memory(prefill: PrefillSettings, num_prefill: int, decode: DecodeSettings, num_decode: int) -> None:
    """Raises InvalidArgument if the memory shares of the services on one GPU add up to more than 1.

    A service with `max_kv_tokens` has no share, because that setting gives its pool's size. It is not counted.
    """
    for device in {prefill.device_key, decode.device_key} - {"cpu"}:
        parts = [
            (num, name, settings.memory_share)
            for num, name, settings in ((num_prefill, "prefill", prefill), (num_decode, "decode", decode))
            if settings.device_key == device and settings.max_kv_tokens is None
        ]
        if sum(num * share for num, _, share in parts) > 1:
            said = " and ".join(
                f"{num} {name} {'service' if num == 1 else 'services'} of {share:g}" for num, name, share in parts
            )
            raise invalid_field(
                "memory_share", f"{said} are more than all of {device}: together at most 1, or unset to divide it"
            )


def _check_device(device: str) -> None:
    """Raises InvalidArgument if the device does not exist. Asks the driver directly, because importing torch takes
    seconds.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            count.value = 0
    except (OSError, AttributeError):
        count.value = 0
    if int(index or 0) >= count.value:
        raise invalid_field("device", f"{device!r} is not there; {count.value} CUDA devices are")


def _check_ports(pair: LocalPair, *settings: ServiceSettings) -> None:
    """Raises InvalidArgument for a port that is taken; a service would notice only after it has loaded its model."""
    given = [("gateway_listen", pair.gateway.address)] if pair.gateway else []
    given += [("metrics_listen", each.metrics_listen) for each in settings if each.metrics_listen]
    metrics = [address for name, address in given if name == "metrics_listen"]
    if pair.metrics_addresses and not set(metrics).issubset(pair.metrics_addresses):
        raise invalid_field("metrics_listen", "the pair gives its services ports for metrics, which its gateway reads")
    for address in {each for each in metrics if metrics.count(each) > 1}:
        raise invalid_field("metrics_listen", f"{address} is given to two services")
    for name, address in given:
        if why := why_not_listen(address):
            raise invalid_field(name, f"cannot listen on {address}: {why}")
