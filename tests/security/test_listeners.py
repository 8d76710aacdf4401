"""Tests that services listen on loopback only, unless they are told otherwise."""

from __future__ import annotations

import os

import pytest

from common.addresses import is_loopback
from common.config.load import load_settings
from common.config.settings import DecodeSettings, PrefillSettings, ServiceSettings


@pytest.mark.parametrize("kind", [PrefillSettings, DecodeSettings])
def test_a_service_listens_on_loopback_by_default_and_not_for_metrics(
    kind: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)

    settings = load_settings(kind, [], program="service")

    addresses = {name: getattr(settings, name) for name in kind.model_fields if name.endswith("listen")}
    assert set(addresses) == {"listen", "metrics_listen"}
    assert is_loopback(addresses["listen"])
    assert addresses["metrics_listen"] == ""
    if isinstance(settings, DecodeSettings):
        assert all(map(is_loopback, settings.prefill))
