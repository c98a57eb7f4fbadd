"""The mathematics of the strategies: pure functions on vectors, each from its paper."""
