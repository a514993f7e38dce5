"""The server: run configuration, the ServerApp, evaluation, checkpoints and telemetry."""
