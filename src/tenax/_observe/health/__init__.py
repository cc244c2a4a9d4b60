"""Health checks over HTTP: whether the agent is alive and its workers are running, even if the agent is stuck."""
