"""Benchmarks: every figure is a ratio of two things measured alternately within one run."""
