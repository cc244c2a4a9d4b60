"""Health: whether the agent is alive and its workers are running, told over HTTP to whoever asks.

``AgentLiveness`` is what the agent writes down about itself; ``judgement`` decides from it; ``HealthCheckServer``
answers
from a thread of its own, so that it can still say so when the agent is stuck. It stands on ``tenax._io.http``, which
knows
nothing of health.
"""
