"""The paper's experiments as commands: data, tasks, training with resume, comparisons, reports."""

__version__ = "0.1.0"
