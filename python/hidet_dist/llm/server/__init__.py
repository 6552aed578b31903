"""Language models and encoders behind HTTP, by the interface of OpenAI."""
