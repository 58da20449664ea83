"""Samples by row: vectors, texts, images and molecules; copies of one photo, scaffolds."""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from .sources import LOG, WrongData

T = TypeVar("T")


class Samples(Protocol):
    """Inputs by row: images of one size as uint8 (3, H, W), strings, or vectors."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, row: int, /) -> Tensor | str:
        """The sample of a row."""
        ...


def optional(module: str, extra: str) -> Any:
    """Import a module that an extra brings, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"This needs {error.name}: pip install './experiments[{extra}]'."
        ) from error


def in_turn(rows: Iterable[T], what: str) -> Iterator[T]:
    """Rows, or tensors of rows, in turn; says every ten seconds how many are done."""
    done, said = 0, time.monotonic()
    for part in rows:
        yield part
        done += len(part) if isinstance(part, Tensor) else 1
        if time.monotonic() - said > 10:
            said = time.monotonic()
            LOG.info("%s: %s done", what, f"{done:,}")


@dataclass(frozen=True)
class Vectors:
    """Samples that are rows of a tensor in memory: vectors, token ids, or decoded images."""

    values: Tensor  # (N, ...)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> Tensor:
        return self.values[row]


# --- Images --------------------------------------------------------------------------------------

FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # others, as EPS, would start other programs
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def decode(
    source: Path | bytes, name: str, size: tuple[int, int] | None = None, fit: bool = False
) -> Tensor:
    """An image as uint8 (3, height, width); grey ones and those with transparency become RGB.

    Args:
        source: path, or content of a file.
        name: for errors.
        size: height and width that it must have.
        fit: give it that size instead: turn it as its camera says, scale it until it just covers
            the size, and cut out its middle.

    Raises:
        WrongData: when it cannot be decoded, is too large or has another size; names the file.
    """
    from PIL import Image, ImageOps

    try:
        stream = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(stream, formats=FORMATS) as image:
            if fit and size is not None:
                upright = ImageOps.exif_transpose(image).convert("RGB")
                fitted = ImageOps.fit(upright, (size[1], size[0]), Image.Resampling.BICUBIC)
                pixels = np.array(fitted)
            else:
                pixels = np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise WrongData(
            f"The image {name} cannot be decoded ({', '.join(FORMATS)} are read): {error}."
        ) from error
    if size is not None and pixels.shape[:2] != size:
        raise WrongData(
            f"The image {name} must have the size of the others, {size[1]} x {size[0]}, but has "
            f"{pixels.shape[1]} x {pixels.shape[0]}."
        )
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


@dataclass(frozen=True)
class ImageFiles:
    """Samples that are image files, decoded whenever a row is read."""

    folder: str  # of all files
    names: tuple[str, ...]  # paths inside it, by row
    size: tuple[int, int]  # height and width of all
    fit: bool = False  # scale and cut images of other sizes, see `decode`, instead of refusing them

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> Tensor:
        path = Path(self.folder, self.names[row])
        return decode(path, str(path), self.size, self.fit)


def image_samples(
    files: Path | Mapping[str, bytes], names: Sequence[str], size: tuple[int, int] | None = None
) -> ImageFiles | Vectors:
    """Samples from a folder, read when they are asked for, or from an archive, decoded at once.

    Args:
        files: the folder, or contents by path.
        names: paths, by row.
        size: height and width that they are given; unless given, all must have that of the first.
    """
    first = files / names[0] if isinstance(files, Path) else files[names[0]]
    high, wide = size or decode(first, names[0]).shape[1:]
    fit = size is not None
    if isinstance(files, Path):
        return ImageFiles(str(files), tuple(names), (high, wide), fit)
    values = torch.empty((len(names), 3, high, wide), dtype=torch.uint8)
    for row, name in enumerate(names):
        values[row] = decode(files[name], name, (high, wide), fit)
    return Vectors(values)


SIDE = 16


def thumbnail(image: Tensor) -> Tensor:
    """Mean brightness (0 to 255) of 16 x 16 fields of an image of (3, H, W), as one row."""
    grey = image.float().mean(0, keepdim=True)
    return torch.nn.functional.adaptive_avg_pool2d(grey, SIDE).flatten()


def distinct_rows(images: Samples, tolerance: float) -> Tensor:
    r"""Rows of the images without those that repeat an earlier row that is kept.

    Two images are taken for copies of one photo when their thumbnails :math:`a, b` of 16 x 16
    fields are close,

    .. math::
        \Bigl(\tfrac{1}{256} \sum\nolimits_k (a_k - b_k)^2\Bigr)^{1/2} \le \text{tolerance},

    which also finds photos that were scaled or compressed again.

    Args:
        images: of three channels and one size.
        tolerance: in steps of brightness, of 255.

    Example:
        >>> grey = torch.full((3, 16, 16), 100, dtype=torch.uint8)
        >>> distinct_rows([grey, grey + 1, grey + 50], tolerance=4.0).tolist()
        [0, 2]
    """
    small = torch.stack([thumbnail(torch.as_tensor(images[row])) for row in range(len(images))])
    # differences first: a matrix product would lose the small distances to rounding
    apart = torch.cdist(small, small, compute_mode="donot_use_mm_for_euclid_dist")
    repeated: set[int] = set()
    for first, other in torch.nonzero((apart <= tolerance * SIDE).triu(1)).tolist():
        if first not in repeated:
            repeated.add(other)
    return torch.tensor([row for row in range(len(small)) if row not in repeated])


# --- Molecules ------------------------------------------------------------------------------------


def rdkit_module(name: str) -> Any:
    """A module of rdkit."""
    return optional(f"rdkit.{name}", "molecules")


def molecule(smiles: str) -> Any:
    """The molecule of a SMILES; also those with valences that rdkit does not know.

    Metal complexes are often written with such valences: they are read without that check.
    """
    chem, log = rdkit_module("Chem"), rdkit_module("rdBase")
    with log.BlockLogs():
        found = chem.MolFromSmiles(smiles, sanitize=False)
        if found is None:
            raise WrongData(f"`{smiles}` is not a molecule in SMILES.")
        found.UpdatePropertyCache(strict=False)
        flags = chem.SanitizeFlags
        failed = chem.SanitizeMol(
            found, flags.SANITIZE_ALL ^ flags.SANITIZE_PROPERTIES, catchErrors=True
        )
    if failed != flags.SANITIZE_NONE:
        raise WrongData(f"`{smiles}` is not a molecule that rdkit can read: {failed}.")
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


def scaffold_split(scaffolds: Sequence[str]) -> np.ndarray:
    """Parts that share no scaffold: 0 to train on, 1 for validation, 2 for tests.

    The sets of molecules with one scaffold, the largest first (of equal ones, that whose first
    molecule comes last), go to the training data while these have room, then to validation, the
    rest to the test data, as in MoleculeNet (Wu et al., 2018).

    Example:
        >>> scaffold_split(["a"] * 8 + ["b", "c"]).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 2, 1]
    """
    sets: dict[str, list[int]] = {}
    for row, name in enumerate(scaffolds):
        sets.setdefault(name, []).append(row)
    shares = 0.8, 0.1
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
