"""Tests that a prefill service does not start unless a prompt's last chunk always has a token for every layer of the
draft head.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.config.settings import PrefillSettings
from common.errors import StartupError
from prefill_service.main import check_chunks


def test_chunks_smaller_than_the_heads_layers_are_refused_by_name() -> None:
    head: Any = SimpleNamespace(layer_group=SimpleNamespace(num_layers=4))
    check_chunks(PrefillSettings(chunk_tokens=4), head)
    check_chunks(PrefillSettings(chunk_tokens=1), None)
    with pytest.raises(StartupError, match=r"^chunk_tokens: 3, but the draft head has 4 layers"):
        check_chunks(PrefillSettings(chunk_tokens=3), head)
