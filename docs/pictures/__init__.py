"""The pictures of the documentation, drawn anew by `python -m docs.pictures`."""
