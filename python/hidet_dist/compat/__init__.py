"""What is bent of hidet 0.6.1, in one place: each with its reason, and a test that fails when it is needless."""
