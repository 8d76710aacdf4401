"""The `baton` command."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when gRPC is imported; what it would print is in its errors too
