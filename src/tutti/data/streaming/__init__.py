"""Training from data that memory does not hold: from files, window by window, while the next one is read."""
