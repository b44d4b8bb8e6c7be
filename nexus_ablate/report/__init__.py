"""Showing comparisons and runs: terminal, HTML, pictures, exports, frames. Computes no number of its own."""
