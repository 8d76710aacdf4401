"""Runs the prefill service with injected faults: `python -m tests.faults.prefill_service` (see service.py)."""

from __future__ import annotations

import sys

from common.config.settings import PrefillSettings
from common.service.process import Serve
from tests.faults.service import run_with_faults


def _import_serve() -> Serve[PrefillSettings]:
    from prefill_service.main import serve

    return serve


if __name__ == "__main__":
    sys.exit(run_with_faults("prefill_service", PrefillSettings, _import_serve, sys.argv[1:]))
