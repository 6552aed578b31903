"""Corrections of hidet 0.6.1, each with its reason, and a test that fails once the correction is unnecessary."""
