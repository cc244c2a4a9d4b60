"""The agent: one node of a run, put together from its parts; and the names TorchElastic's users know (``server``)."""
