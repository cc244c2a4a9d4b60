"""Worker logs: where output goes, and the process that writes it. Imports nothing, so that the log writer starts fast."""
