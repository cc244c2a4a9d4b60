"""tenax measured beside torchrun; run with `python -m benchmarks` (see `__main__`)."""
