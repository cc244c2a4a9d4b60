"""Nodes agree on a group. The public names of ``tenax.rendezvous.api``."""

from tenax.rendezvous.api import *  # noqa: F403
from tenax.rendezvous.api import __all__ as __all__
