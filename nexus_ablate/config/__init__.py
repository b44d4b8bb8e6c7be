"""What may be asked for, in a straight line: grammar, plugins, options, run_config, compose."""
