"""Columns of a bucket for rows of any DataFrame: ``lookup``."""
