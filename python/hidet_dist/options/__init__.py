"""Options: the fields of configurations, each defined once, with its default, its check and its meaning."""
