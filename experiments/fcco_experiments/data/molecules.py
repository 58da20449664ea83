"""Molecules, given as SMILES: how they are read, and how they are split by scaffold."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .sources import WrongData


def rdkit_module(name: str) -> Any:
    """Import a module of rdkit, or say how to install it."""
    try:
        return importlib.import_module(f"rdkit.{name}")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Molecules need {error.name}: pip install './experiments[molecules]'."
        ) from error


def molecule(smiles: str) -> Any:
    """The molecule of a SMILES; also those with valences that rdkit does not know.

    Metal complexes are often written with such valences: they are read without that check.
    """
    chem, log = rdkit_module("Chem"), rdkit_module("rdBase")
    with log.BlockLogs():
        found = chem.MolFromSmiles(smiles, sanitize=False)
        if found is None:
            raise WrongData(f"`{smiles}` is no molecule in SMILES.")
        found.UpdatePropertyCache(strict=False)
        flags = chem.SanitizeFlags
        failed = chem.SanitizeMol(
            found, flags.SANITIZE_ALL ^ flags.SANITIZE_PROPERTIES, catchErrors=True
        )
    if failed != flags.SANITIZE_NONE:
        raise WrongData(f"`{smiles}` is no molecule that rdkit can read: {failed}.")
    return found


def scaffold(smiles: str) -> str:
    """The Bemis-Murcko scaffold of a molecule, its rings and what links them, as SMILES.

    It is empty for a molecule without rings.
    """
    chem = rdkit_module("Chem")
    # Not `MurckoScaffoldSmiles`, which checks valences.
    found = rdkit_module("Chem.rdmolops").MurckoDecompose(molecule(smiles))
    found.ClearComputedProps()
    found.UpdatePropertyCache(strict=False)
    return chem.MolToSmiles(found, isomericSmiles=False)


def scaffold_split(
    scaffolds: Sequence[str], shares: tuple[float, float] = (0.8, 0.1)
) -> np.ndarray:
    """Parts that share no scaffold: 0 to train on, 1 for validation, 2 for tests.

    The sets of molecules with one scaffold, the largest first (of equal ones, that whose first
    molecule comes last), go to the training data while these have room, then to validation, the
    rest to the test data, as in MoleculeNet.

    Args:
        scaffolds: of each molecule.
        shares: of training and validation data; the rest is test data.

    References:
        Wu et al. (2018), MoleculeNet: a benchmark for molecular machine learning.

    Example:
        >>> scaffold_split(["a"] * 8 + ["b", "c"]).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 2, 1]
    """
    sets: dict[str, list[int]] = {}
    for row, name in enumerate(scaffolds):
        sets.setdefault(name, []).append(row)
    room = [shares[0] * len(scaffolds), sum(shares) * len(scaffolds)]
    split, sizes = np.full(len(scaffolds), 2), [0, 0]
    for rows in sorted(sets.values(), key=lambda rows: (len(rows), rows[0]), reverse=True):
        if sizes[0] + len(rows) <= room[0]:
            place = 0
        elif sum(sizes) + len(rows) <= room[1]:
            place = 1
        else:
            continue
        split[rows] = place
        sizes[place] += len(rows)
    return split
