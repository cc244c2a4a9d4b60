"""The folder at the front of a template's PYTHONPATH, for the ``sitecustomize`` in it.

The other files here run in that interpreter and in the workers forked from it, never in the agent.
"""

import os

FOLDER = os.path.dirname(os.path.abspath(__file__))
VARIABLE = "TENAX_TEMPLATE"  # descriptor number of the channel to the keeper
CHANNEL_DESCRIPTOR = 3
