"""`python -m fcco` is the command `fcco`."""

from .cli import main

if __name__ == "__main__":
    main()
