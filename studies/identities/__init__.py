"""False-positive rates of overlapping identity groups on comments, with and without constraints.

`python -m studies.identities` is the command. `comments` holds data, groups and features,
`methods` what is compared, `training` one run and its figures, `end_to_end` the whole network.
"""
