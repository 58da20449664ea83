"""The training rows of Adult and COMPAS, without a validation part: as the page's figures had them.

The files are looked for where `fcco_experiments.data` does, but nothing is fetched here.
"""

from __future__ import annotations

from fcco_experiments.data import MissingData, Part
from fcco_experiments.data import load as load_parts

__all__ = ["MissingData", "Part", "load"]


def load(name: str) -> Part:
    """The training part of `"adult"` or `"compas"`."""
    return load_parts(name, download=False, validation=0.0).train
