"""The tcp engine: the agent at the endpoint serves the coordinator, and every agent links to it."""
