"""Worker logs: where output goes, and the process that writes it.

``specs`` holds the configuration; ``lines`` formats console lines; ``writer_main`` is the log writer process and
``writer`` the agent's handle of it. This file imports nothing, so that the log writer starts fast.
"""
