"""A run as it goes on, seen from outside: from its records alone, by whoever sees its folder."""
