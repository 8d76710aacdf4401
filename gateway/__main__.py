"""`python -m gateway`"""

from __future__ import annotations

import sys

from gateway.main import run_gateway

if __name__ == "__main__":
    sys.exit(run_gateway(sys.argv[1:]))
