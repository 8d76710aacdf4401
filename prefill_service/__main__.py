"""Runs the prefill service as `python -m prefill_service`."""

from __future__ import annotations

import sys

from common.config.settings import PrefillSettings
from common.service.process import Serve, run_service


def main() -> int:
    return run_service("prefill_service", PrefillSettings, _import_serve, sys.argv[1:])


def _import_serve() -> Serve[PrefillSettings]:
    from prefill_service.main import serve

    return serve


if __name__ == "__main__":
    sys.exit(main())
