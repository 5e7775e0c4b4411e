"""Benchmarks that a sceptic can re-run: ``python -m benchmarks run NAME``. See README.md."""
