"""Constraints without any setting, beside peers with their defaults and the best tuned results."""
