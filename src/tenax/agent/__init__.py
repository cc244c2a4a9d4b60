"""TorchElastic's agent, in ``tenax.agent.server``."""
