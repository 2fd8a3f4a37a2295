"""Populations: packed examples, splits, sources, files and stores."""
