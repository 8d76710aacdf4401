"""Runs the gateway as `python -m gateway`."""

from __future__ import annotations

import sys

from common.telemetry.logs import only_log_lines


def main() -> int:
    with only_log_lines():  # must be set up before gRPC is imported
        from gateway.main import run_gateway

        return run_gateway(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
