"""Helpers of the benchmarks: servers and buckets, the measured machine, the report."""
