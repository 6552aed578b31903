"""Models of other libraries as graphs."""
