"""The command `python -m research.constrained`."""

from .study import main

main()
