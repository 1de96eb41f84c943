"""Measurements against torch's DistributedDataParallel: ``python -m benchmarks``. See docs/measuring.md."""
