"""External compilers: their location, and whether they work."""
