"""``python -m tenax`` runs ``tenax``."""

from __future__ import annotations

from tenax.cli.main import main

if __name__ == "__main__":  # workers spawned by multiprocessing import this module again
    raise SystemExit(main())
