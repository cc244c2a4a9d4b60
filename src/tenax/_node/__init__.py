"""One agent process: assembly, supervisor, signals, journals, log queries, control socket and observers."""
