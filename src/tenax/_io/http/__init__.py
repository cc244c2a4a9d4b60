"""A small HTTP server for health probes, the dashboard and the workers' control plane. See ``server``."""
