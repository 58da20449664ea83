"""Images with captions: folders, archives and tables as those who collect pairs write them."""

from __future__ import annotations

import csv
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fcco._checks import integer, one_of

from .grouped import Samples
from .images import Piece, PieceImages, decode, pieces
from .sources import WrongData, digest, few
from .table import long_cells, rows_of

__all__ = ["PairedData", "read_pairs"]

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
PATHS = ("filepath", "path", "image", "file")
CAPTIONS = ("title", "caption", "text")


@dataclass(frozen=True)
class PairedData:
    """Images and their captions.

    Attributes:
        samples: the images, by row.
        captions: by row.
        fingerprint: changes when the data do.
        facts: what a reader may want to know, such as how many pairs were left out.
    """

    samples: Samples
    captions: tuple[str, ...]
    fingerprint: str
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse images without captions and captions without images."""
        if len(self.samples) != len(self.captions):
            raise ValueError(
                f"`PairedData` must have a caption for each image but has {len(self.samples)} "
                f"images and {len(self.captions)} captions."
            )

    def __len__(self) -> int:
        return len(self.captions)


class _Pair(NamedTuple):
    """An image and its caption, and what is wrong with them as far as can be seen at once."""

    image: Piece
    caption: str
    damage: str = ""


def read_pairs(
    path: str | os.PathLike[str],
    *,
    size: tuple[int, int] = (224, 224),
    limit: int = 0,
    on_damaged: Literal["error", "skip"] = "error",
) -> PairedData:
    """Pairs of images and captions, such as those of LAION, from files on this machine.

    The images are scaled until they just cover `size`, and their middle is cut out. They are read
    and decoded when a row is asked for.

    Args:
        path: one of three kinds. A folder as the program img2dataset writes it, with files such as
            `00000/000000012.jpg` and their caption in `000000012.txt`, or under `caption` in
            `000000012.json`. An archive with such files (`.tar`, as for webdataset), or a folder of
            those. A table (`.csv`, `.tsv`, or `.parquet` where pyarrow or pandas is installed) with
            a column `filepath`, `path`, `image` or `file`, relative to the table's folder, and a
            column `title`, `caption` or `text`.
        size: height and width.
        limit: pairs that are kept, the first ones; 0 keeps all.
        on_damaged: with `"error"`, refuse pairs without image or caption, and damaged images when
            they are read. With `"skip"`, decode every image once, leave out what is damaged, and
            count it in the facts.

    Raises:
        FileNotFoundError: when there is no such path.
        WrongData: when it is something else, or a pair is damaged; it names the file.
    """
    for each in size:
        integer("read_pairs", "size", each, 1)
    integer("read_pairs", "limit", limit, 0)
    one_of("read_pairs", "on_damaged", on_damaged, ("error", "skip"))
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"`read_pairs`: {root} does not exist.")
    kind, found = _source(root)
    skipped: list[_Pair] = []
    if on_damaged == "skip":
        found = _whole(found, size, skipped)
    pairs = list(islice(found, limit or None))
    wrong = [f"{pair.image} {pair.damage}" for pair in pairs if pair.damage]
    if wrong:
        raise WrongData(
            f"`read_pairs`: {len(wrong):,} of {len(pairs):,} pairs are damaged: {few(wrong)} "
            '(on_damaged="skip" leaves them out).'
        )
    if not pairs:
        raise WrongData(f"`read_pairs`: {root} has no pair of image and caption ({kind}).")
    marks = (f"{pair.image.name} {pair.image.size} {pair.caption}" for pair in pairs)
    return PairedData(
        samples=PieceImages(tuple(pair.image for pair in pairs), (size[0], size[1])),
        captions=tuple(pair.caption for pair in pairs),
        fingerprint=digest("pairs", *size, *marks),
        facts={
            "kind": kind,
            "pairs": f"{len(pairs):,}",
            "damaged pairs left out": f"{len(skipped):,}",
        },
    )


def _source(root: Path) -> tuple[str, Iterator[_Pair]]:
    """What is there, in a word, and the pairs in it."""
    if root.is_dir():
        shards = sorted(root.glob("*.tar"))
        return ("archives", _archives(shards)) if shards else ("folder", _folder(root))
    suffix = root.suffix.lower()
    if suffix == ".tar":
        return "archives", _archives([root])
    if suffix == ".parquet":
        return "table", _listed(root, _parquet(root))
    if suffix in (".csv", ".tsv"):
        return "table", _listed(root, _text_table(root))
    raise WrongData(
        f"`read_pairs`: {root} must be a folder, a .tar archive, or a table (.csv, .tsv, .parquet)."
    )


def _whole(pairs: Iterator[_Pair], size: tuple[int, int], skipped: list[_Pair]) -> Iterator[_Pair]:
    """The pairs whose image can be decoded; the others are noted."""
    for pair in pairs:
        try:
            if not pair.damage:
                decode(pair.image.read(), str(pair.image), size, fit=True)
                yield pair
                continue
        except WrongData:
            pass
        skipped.append(pair)


def _archives(shards: Sequence[Path]) -> Iterator[_Pair]:
    for shard in shards:
        yield from _together(pieces("read_pairs", shard))


def _folder(root: Path) -> Iterator[_Pair]:
    # Files with a dot in front are not the user's: macOS puts `._name.jpg` beside `name.jpg`.
    files = sorted(each for each in root.rglob("*") if each.is_file() and each.name[0] != ".")
    return _together([_piece(each, each.relative_to(root).as_posix()) for each in files])


def _piece(file: Path, name: str) -> Piece:
    return Piece(str(file), name, 0, file.stat().st_size)


def _together(found: Sequence[Piece]) -> Iterator[_Pair]:
    """Files of one name are a pair. A caption whose image is not there is a damaged one."""
    files = {each.name: each for each in found}
    with_image = set()
    for name, own in files.items():
        stem, suffix = os.path.splitext(name)
        if suffix.lower() in IMAGES:
            with_image.add(stem)
            caption = _caption(files.get(f"{stem}.txt"), files.get(f"{stem}.json"))
            yield _Pair(own, caption, "" if caption else "has no caption")
    for name, own in files.items():
        stem, suffix = os.path.splitext(name)
        if suffix == ".txt" and stem not in with_image:
            yield _Pair(own, "", "has no image")


def _caption(text: Piece | None, record: Piece | None) -> str:
    with suppress(ValueError, RecursionError):  # neither text nor json: the same as no caption
        if text is not None:
            return text.read().decode("utf-8-sig").strip()
        if record is not None:
            own = json.loads(record.read())
            found = own.get("caption") if isinstance(own, dict) else None
            return found.strip() if isinstance(found, str) else ""
    return ""


def _listed(table: Path, rows: Iterator[tuple[str, str]]) -> Iterator[_Pair]:
    """The pairs of a table, whose paths begin in its folder."""
    for name, caption in rows:
        file = table.parent / name
        if not name or not file.is_file():
            yield _Pair(Piece(str(file), name, 0, 0), caption, "is missing")
        else:
            caption = caption.strip()
            yield _Pair(_piece(file, name), caption, "" if caption else "has no caption")


def _columns(table: Path, header: Sequence[str]) -> tuple[str, str]:
    """The names of the two columns, the first of those that will do."""
    found = [[name for name in names if name in header] for names in (PATHS, CAPTIONS)]
    for names, own in zip((PATHS, CAPTIONS), found, strict=True):
        if not own:
            raise WrongData(
                f"`read_pairs`: {table} must have a column {', '.join(names[:-1])} or {names[-1]}; "
                f"its header is {', '.join(header) or 'empty'}."
            )
    return found[0][0], found[1][0]


def _text_table(table: Path) -> Iterator[tuple[str, str]]:
    try:
        with long_cells(), table.open(newline="", encoding="utf-8-sig") as lines:
            first = lines.readline()
            delimiter = "\t" if "\t" in first else ","  # also under .csv, as open_clip has it
            columns = _columns(table, next(csv.reader([first], delimiter=delimiter), []))
            rows = rows_of("read_pairs", str(table), chain([first], lines), columns, delimiter)
            found = [(name, caption) for name, caption in rows]
    except UnicodeDecodeError as error:
        raise WrongData(f"`read_pairs`: {table} is no text: {error}.") from error
    yield from found


def _parquet(table: Path) -> Iterator[tuple[str, str]]:
    try:
        content = _parquet_columns(table)
    except (ValueError, OSError) as error:
        raise WrongData(f"`read_pairs`: {table} cannot be read: {error}.") from error
    for cells in zip(*content, strict=True):
        name, caption = (cell if isinstance(cell, str) else "" for cell in cells)
        yield name, caption


def _parquet_columns(table: Path) -> tuple[list[Any], list[Any]]:
    """The two columns, read with pyarrow itself or through pandas."""
    package: Any
    try:
        package = importlib.import_module("pyarrow.parquet")
    except ImportError:
        try:
            package = importlib.import_module("pandas")
            frame = package.read_parquet(table)
        except ImportError as error:
            raise ImportError(
                f"`read_pairs`: {table} needs the package pyarrow, or pandas with a package that "
                "reads parquet files."
            ) from error
        first, second = _columns(table, list(frame.columns))
        return frame[first].tolist(), frame[second].tolist()
    first, second = _columns(table, list(package.read_schema(table).names))
    content = package.read_table(table, columns=[first, second]).to_pydict()
    return content[first], content[second]
