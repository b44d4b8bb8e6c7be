"""Published decoders: a Hugging Face config.json as overrides, and its weights as ours. Needs no `transformers`."""
