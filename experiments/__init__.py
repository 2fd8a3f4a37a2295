"""Runnable experiments, one module each, and the command line."""
