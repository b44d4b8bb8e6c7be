"""Import published decoders: a Hugging Face config.json as overrides, and weights. Doesn't need `transformers`."""
