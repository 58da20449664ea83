"""Samples and seconds to each accuracy, on small problems whose solution is known.

All settings and seeds of one method run as one batched program: a parameter is a tensor of shape
(seeds, settings, d), a table of tracked values one of shape (seeds, settings, n). The update rules
are the library's own pure functions; a test follows the library's public objectives step by step.
"""
