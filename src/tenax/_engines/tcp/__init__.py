"""The tcp engine: the coordinator served by the agent at the endpoint, and every agent's way to it."""
