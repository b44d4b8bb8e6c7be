"""Published decoders: what the `transformers` library reads, as overrides, with the proof that it is the same."""
