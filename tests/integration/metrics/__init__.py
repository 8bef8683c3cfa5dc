"""Metrics of queries: values, endpoints, the dashboard and the alerts."""
