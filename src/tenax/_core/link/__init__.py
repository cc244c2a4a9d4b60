"""The links between agents and the coordinator: their frames, and both sides as pure machines."""
