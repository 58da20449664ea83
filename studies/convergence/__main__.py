"""The command `python -m studies.convergence`."""

from .study import main

main()
