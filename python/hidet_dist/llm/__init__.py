"""Language models: a checkpoint in, tokens out.

``step`` and ``text`` say what a loaded model and a tokenizer offer. ``engine`` serves many requests with them at once,
``ranks`` steps one model on several ranks, and ``server`` puts an engine behind HTTP.
"""
