"""``python -m tenax`` is ``tenax``."""

from __future__ import annotations

from tenax.cli.main import main

if __name__ == "__main__":  # a worker that multiprocessing spawns imports this module again
    raise SystemExit(main())
