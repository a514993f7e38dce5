"""The server's room: run configuration, the ServerApp, evaluation, checkpoints and telemetry."""
