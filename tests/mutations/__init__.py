"""Breaks the code in small ways, and lists those that no test notices: `make test-mutations`."""
