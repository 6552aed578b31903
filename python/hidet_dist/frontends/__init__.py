"""Front ends: models of other libraries as graphs."""
