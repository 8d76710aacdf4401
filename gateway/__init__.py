"""The OpenAI-compatible HTTP edge over the gRPC client."""
