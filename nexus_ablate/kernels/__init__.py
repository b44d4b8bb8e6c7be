"""Fast forms of what axes/ and training/ define, each beside the plain form that it must equal."""
