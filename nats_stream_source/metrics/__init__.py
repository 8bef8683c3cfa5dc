"""Metrics of running queries, for Prometheus and OpenTelemetry.

:mod:`table` declares them, :mod:`counts` counts events in any process, :mod:`recorder` has the
values in the driver's process, and :mod:`exporters` serves them. ``spark.progress`` and ``delta``
feed the recorder.
"""
