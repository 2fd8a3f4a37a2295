"""Federated learning over networks of devices: total variation minimisation."""
