"""The `baton` command."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when gRPC is imported; its errors say the same
