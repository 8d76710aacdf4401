"""The gateway: an OpenAI-compatible HTTP server that calls the decode services over gRPC."""
