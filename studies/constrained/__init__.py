"""Constrained problems, methods of other libraries, and what mini-batches do to a penalty."""
