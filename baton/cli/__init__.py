"""The `baton` command and its subcommands."""

import os

# gRPC reads this when it is imported; its errors say the same as its log lines.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
