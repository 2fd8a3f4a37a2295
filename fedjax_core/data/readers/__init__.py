"""Readers of data files; none of them runs code that a file brings."""
