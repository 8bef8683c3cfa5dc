"""Checkpoints as earlier versions wrote them, with the streams that they are of.

``<version>/store.tar.gz`` is the store of a nats-server, so that creation times, sequences and
times are those that the offsets have; ``<version>/<case>/checkpoint`` is what Spark and this source
wrote, ``<version>/cases.json`` what must come when a query goes on from there. Directories whose
names go on behind the version are of other stories: ``stories.py`` tells them, of queries on what
``scene.py`` has. ``write.py`` makes them; ``tests/test_golden.py`` goes on from every one.
"""
