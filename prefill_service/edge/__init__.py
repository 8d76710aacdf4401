"""The prefill service's gRPC edge."""
