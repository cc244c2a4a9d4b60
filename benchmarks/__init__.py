"""Benchmarks of tenax and torchrun; run with `python -m benchmarks` (see `__main__`)."""
