"""The ranks of one host, over shared memory."""
