"""Showing comparisons and runs: terminal, HTML, pictures, exports. Computes no number of its own."""
