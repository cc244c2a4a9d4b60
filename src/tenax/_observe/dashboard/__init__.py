"""The dashboard of a run, served by the coordinator's agent. Imported only for ``--dashboard``."""
