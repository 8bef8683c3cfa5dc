"""Checkpoints that earlier versions wrote, with the streams that they belong to.

``<version>/store.tar.gz`` is the store of a nats-server, so that creation times, sequences and
times are those that the offsets have; ``<version>/<case>/checkpoint`` holds what Spark and this
source wrote, ``<version>/cases.json`` the rows that must come when a query resumes from there.
Directories with a suffix after the version hold other histories (``histories.py``), of queries on
the data in ``dataset.py``. ``write.py`` makes them; ``test_golden.py`` resumes from each of them.
"""
