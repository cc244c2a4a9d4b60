"""The schedulers that tenax knows. ``tenax.scheduler`` chooses one."""
