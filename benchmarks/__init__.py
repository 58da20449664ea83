"""Measurements of time and memory; each module is a command, `python -m benchmarks.NAME`."""

import studies

# Commands that were here before: `python -m studies.xrisk` runs `studies.xrisk`.
__path__ = [*__path__, *studies.__path__]
