"""Fast forms of operations in axes/ and training/, each next to the plain form that it must equal."""
