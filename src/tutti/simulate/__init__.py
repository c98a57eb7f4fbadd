"""Predict how a training scales on a cluster: its speed, traffic and losses, by virtual ranks."""
