"""The documentation site: `python -m website` builds it from `docs/`, the docstrings and the command line."""
