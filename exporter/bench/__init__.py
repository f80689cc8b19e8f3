"""Benchmarks of a bundle on the machine it is on: see `measure.bench_bundles`."""
