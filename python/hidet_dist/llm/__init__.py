"""Language models: a checkpoint in, tokens out.

``step`` and ``text`` say what a loaded model and a tokenizer offer. ``engine`` serves many requests with them at once.
"""
