"""Tracing: a run as a trace of OpenTelemetry. Imported for ``--trace``, and by nobody else."""
