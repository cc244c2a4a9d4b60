"""The model is a package at the root of the repository, which an installed tenax does not bring along."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
