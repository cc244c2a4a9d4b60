"""Tracing: sends a run as an OpenTelemetry trace. Imported only for ``--trace``."""
