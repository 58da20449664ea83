"""Comparisons whose results are written up in docs/; see README.md here."""
