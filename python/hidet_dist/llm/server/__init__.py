"""Language models behind HTTP, by the interface of OpenAI: completions, chats, tokens, health and metrics."""
