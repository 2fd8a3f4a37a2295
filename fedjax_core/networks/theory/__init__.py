"""Bounds, diagnoses and exercises of Jung's book on networks of devices."""
