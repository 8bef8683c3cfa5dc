"""Checkpoints and Delta tables that earlier versions wrote.

**Checkpoints**, with the streams that they belong to. ``<version>/store.tar.gz`` is the store of a
nats-server, so that creation times, sequences and times are those that the offsets have;
``<version>/<case>/checkpoint`` holds what Spark and this source wrote, ``<version>/cases.json`` the
rows that must come when a query resumes from there. Directories with a suffix after the version
hold other histories of queries on its data. ``write.py`` makes them;
``test_golden.py`` resumes from each of them.

**Tables.** ``tables-<version>/<name>.tar.gz`` has a table and its state table, and
``tables-<version>/<name>.json`` the arguments of ``merge``, the rows, an old batch that changes
nothing, and the next batch with the rows after it. ``write_delta_tables.py`` has their
histories and makes them; ``test_delta_tables.py`` continues each of them.
"""
