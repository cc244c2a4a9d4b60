"""Health checks over HTTP: whether the agent is alive and its workers are running.

The agent records its state in ``AgentLiveness``; ``HealthCheckServer`` judges it and answers from a thread of
its own, so that it also answers when the agent is stuck.
"""
