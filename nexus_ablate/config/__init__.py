"""Configuration, each module building on the ones before: grammar, plugins, options, run_config, resolve, compose."""
