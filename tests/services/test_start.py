"""What a service's process does before it serves."""

from __future__ import annotations

import gc
import sys

import pytest

from common.config.settings import DecodeSettings
from common.errors import StartupError
from common.process_exit import EXIT_STARTUP
from common.service_main import Serve, run_service


def test_what_is_imported_is_never_searched_for_garbage_and_what_comes_after_it_is() -> None:
    is_searched: list[bool] = []
    num_left_out = gc.get_freeze_count()

    def import_serve() -> Serve[DecodeSettings]:
        is_searched.append(gc.isenabled())
        raise StartupError("far enough")

    assert run_service("decode_service", DecodeSettings, import_serve, []) == EXIT_STARTUP
    try:
        assert is_searched == [False]
        assert gc.isenabled() and gc.get_freeze_count() > num_left_out
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("argv", "interval_s"), [([], 0.0005), (["--switch-interval-s=0.002"], 0.002)])
def test_threads_hand_the_interpreters_lock_over_early(argv: list[str], interval_s: float) -> None:
    seen: list[float] = []
    before = sys.getswitchinterval()

    def import_serve() -> Serve[DecodeSettings]:
        seen.append(sys.getswitchinterval())
        raise StartupError("far enough")

    try:
        sys.setswitchinterval(0.005)
        assert run_service("decode_service", DecodeSettings, import_serve, argv) == EXIT_STARTUP
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
    assert seen == [pytest.approx(interval_s)]
