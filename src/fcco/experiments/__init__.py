"""The paper's experiments as commands: data, tasks, training with resume, comparisons, reports.

Needs the extra `fcco[experiments]`. Nothing in the library imports this package.
"""
