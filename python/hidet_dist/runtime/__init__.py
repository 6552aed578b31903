"""The runtime of serving processes: it meets other ranks, loads artifacts, and runs programs that communicate."""
