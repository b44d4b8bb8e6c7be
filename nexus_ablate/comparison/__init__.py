"""Reading runs and saying what they show. Works on any set of run directories and imports no torch."""
