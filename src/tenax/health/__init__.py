"""Health: whether the agent is alive and its workers are running, told over HTTP to whoever asks.

``VitalSigns`` is what the agent writes down about itself; ``judgement`` decides from it; ``HealthCheckServer`` answers
from a thread of its own, so that it can still say so when the agent is stuck. ``http`` and ``http_server`` know nothing
of health: ``tenax.control_plane`` stands on them too.
"""
