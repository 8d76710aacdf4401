"""Runs the decode service with injected faults: `python -m tests.faults.decode_service` (see service.py)."""

from __future__ import annotations

import sys

from common.config.settings import DecodeSettings
from common.service.process import Serve
from tests.faults.service import run_with_faults


def _import_serve() -> Serve[DecodeSettings]:
    from decode_service.main import serve

    return serve


if __name__ == "__main__":
    sys.exit(run_with_faults("decode_service", DecodeSettings, _import_serve, sys.argv[1:]))
