"""NATS's numbers of failures without an error class; ``errors.py`` has those of the classes."""

from __future__ import annotations

UNAVAILABLE = 503
"""Status: no responders, or a server that cannot process the request at the moment."""

# err_codes of JetStream
NO_PEERS = 10005  # the cluster lacks servers for the placement or the replicas
MAX_STREAMS_EXCEEDED = 10027  # of the account
MEMORY_RESOURCES_EXCEEDED, STORAGE_RESOURCES_EXCEEDED = 10028, 10047  # for a new stream
INVALID_STREAM_CONFIG = 10052
REPLICAS_NOT_SUPPORTED = 10074  # the server is not in a cluster
MAX_BYTES_REQUIRED = 10113  # by the account, for each stream
NO_LIMITS = 10120  # the account has limits by the number of replicas, and none for this one
MAX_STREAM_BYTES_EXCEEDED = 10122  # the account's limit of one stream
PERMANENT = frozenset(
    (
        MEMORY_RESOURCES_EXCEEDED,
        STORAGE_RESOURCES_EXCEEDED,
        INVALID_STREAM_CONFIG,
        REPLICAS_NOT_SUPPORTED,
    )
)  # code 500, and the same request fails again
STORAGE_USED_UP = (
    10002,  # the account has used the storage that it may use; a message is refused
    10023,  # the same, of the server
)
CONSUMER_NAME_IN_USE = frozenset((10013, 10105, 10148))
ACK_PENDING_WITHOUT_ACKS = 10082  # the consumer's own, or that of the stream's consumer_limits
INACTIVE_THRESHOLD_EXCEEDS_LIMIT = 10153  # of the stream's consumer_limits
WRONG_LAST_SEQUENCE_OF_OLD_SERVERS = 10164  # the description contains no sequence
TOO_MANY_REQUESTS = 10167  # code 429: the stream has max_buffered_msgs messages to store
TRANSIENT_REJECTIONS = frozenset(
    (
        10008,  # JetStream system temporarily unavailable
        10158,  # the first message with this id is not stored on a majority of replicas yet
        10163,  # the expected last sequence of the subject is temporarily unavailable
        TOO_MANY_REQUESTS,
    )
)
UNKNOWN_BATCH, TOO_MANY_BATCHES = 10208, 10211  # of fast ingest
