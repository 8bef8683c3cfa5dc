"""Benchmarks: each figure is a ratio of two measurements that alternate within one run."""
