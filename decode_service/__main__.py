"""Runs the decode service as `python -m decode_service`."""

from __future__ import annotations

import sys

from common.config.settings import DecodeSettings
from common.service.process import Serve, run_service


def main() -> int:
    return run_service("decode_service", DecodeSettings, _import_serve, sys.argv[1:])


def _import_serve() -> Serve[DecodeSettings]:
    from decode_service.main import serve

    return serve


if __name__ == "__main__":
    sys.exit(main())
