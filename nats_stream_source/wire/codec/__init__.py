"""The codecs of a bucket's keys and values (ADR-54): one at a time, and as Arrow columns."""
