"""The command `python -m research.convergence`."""

from .study import main

main()
