"""The library without any setting, beside peers with their defaults and the best tuned results.

`python -m studies.untuned` is the command. `constraints` and `groups` hold problems and methods,
`tuned` the settings that a search over grids chose.
"""
