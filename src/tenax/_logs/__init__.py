"""Worker logs: where output goes, and the process that writes it. Imports nothing: the log writer must start fast."""
