"""Reads the state of a bucket or stream: the last message of each subject, now or at a sequence."""
