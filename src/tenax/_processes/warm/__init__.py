"""A folder that a template gets in front of its PYTHONPATH, for the ``sitecustomize`` in it.

The other files here run in that interpreter and in the workers forked from it, never in the agent.
"""

import os

FOLDER = os.path.dirname(os.path.abspath(__file__))
VARIABLE = "TENAX_TEMPLATE"  # the number of the descriptor that is the channel to the keeper
CHANNEL_DESCRIPTOR = 3
