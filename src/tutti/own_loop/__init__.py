"""The user's own training loops: `tutti.distribute` and its implementation."""
