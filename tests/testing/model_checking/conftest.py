"""Make the package ``model`` importable: it is at the root of the repository and is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
