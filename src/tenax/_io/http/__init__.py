"""A small HTTP server: for probes, for pages, and for workers that can be asked. See ``server`` for its law."""
