"""Many requests over one model at once: pages, a schedule, sampling."""
