"""Serving processes: they meet, load artifacts, and run compiled programs that communicate."""
