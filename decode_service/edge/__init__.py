"""The Inference service: validates requests, hands them to the engine, and turns its events into streams."""
