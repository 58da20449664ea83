"""Small data sets in the layouts of CelebA, Camelyon17-WILDS, Amazon-WILDS and the opinions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from data_fixtures import change_card, put
from fcco_experiments import data
from PIL import Image
from scenes_fixtures import saved, tar, unpack

__all__ = ["Faces", "Patches", "Reviews", "opinions", "put", "stand_in"]

FOUR = ("Attractive", "Mouth_Slightly_Open", "Male", "Blond_Hair")  # make the 16 groups
ATTRIBUTES = [*FOUR, "Bald", "Gray_Hair", "Smiling"]
FACE = (24, 20)  # height, width


def image(number: int, size: tuple[int, int] = FACE, form: str = "JPEG") -> bytes:
    """One colour, by which the image is known again."""
    colour = (number % 64 * 4, number // 64 * 4, 128)
    return saved(Image.new("RGB", (size[1], size[0]), colour), form, quality=100)


class Faces:
    """Images with attributes; group g of the 16 has 3 + g % 4 of them, in random order."""

    def __init__(self) -> None:
        random = np.random.RandomState(0)
        self.groups = random.permutation([g for g in range(16) for _ in range(3 + g % 4)]).tolist()
        self.names = [f"{number:06d}.jpg" for number in range(1, len(self.groups) + 1)]
        self.table = pd.DataFrame(
            random.choice([-1, 1], size=(len(self.names), len(ATTRIBUTES))),
            columns=ATTRIBUTES,
        )
        for place, name in enumerate(FOUR):
            self.table[name] = [1 if group >> (3 - place) & 1 else -1 for group in self.groups]

    def files(self) -> dict[str, bytes]:
        """In the official layout."""
        head = f"{len(self.names)}\n{' '.join(ATTRIBUTES)} \n"  # the real header ends in a space
        rows = zip(self.names, self.table.to_numpy(), strict=True)
        lines = [f"{name} " + " ".join(f"{value:2d}" for value in row) for name, row in rows]
        images = {f"img_align_celeba/{n}": image(k) for k, n in enumerate(self.names)}
        return {"list_attr_celeba.txt": (head + "\n".join(lines) + "\n").encode(), **images}

    def official(self, folder: Path) -> Path:
        return unpack(self.files(), folder)

    def archive(self) -> bytes:
        return tar({f"celeba/{name}": content for name, content in self.files().items()})


class Patches:
    """Two slides of hospital 0, one each of 1 to 4; ten patches of each, two of them set aside."""

    header = ("patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
    slides = ((0, 4), (0, 7), (1, 11), (2, 23), (3, 31), (4, 40))

    def __init__(self) -> None:
        self.rows: list[list] = []
        for center, slide in self.slides:
            for number in range(10):
                patient = f"{slide:03d}"  # leading zeros are part of the name
                place = [patient, slide % 5, 3328 + 32 * number, 21792 + number]
                self.rows.append([*place, number % 2, slide, center, int(number >= 8)])
        np.random.RandomState(0).shuffle(self.rows)

    def path(self, row: list) -> str:
        inner = f"patient_{row[0]}_node_{row[1]}"
        return f"{inner}/patch_{inner}_x_{row[2]}_y_{row[3]}.png"

    def write(self, root: Path) -> Path:
        rows = enumerate(self.rows)
        images = {f"patches/{self.path(row)}": image(k, (96, 96), "PNG") for k, row in rows}
        folder = unpack(images, root / "camelyon17_v1.0")
        pd.DataFrame(self.rows, columns=list(self.header)).to_csv(folder / "metadata.csv")
        return folder


class Reviews:
    """Reviews of users, shuffled; texts hold what csv must quote."""

    def __init__(self, counts: dict[str, int]) -> None:
        random = np.random.RandomState(0)
        users = random.permutation([user for user, count in counts.items() for _ in range(count)])
        self.table = pd.DataFrame({
            "reviewerID": users,
            "overall": random.randint(1, 6, len(users)).astype(float),
            "reviewText": [f'review {n}, "good",\nand more' for n in range(len(users))],
            "summary": "Five",
        })  # fmt: skip

    def content(self) -> bytes:
        return self.table.to_csv(index=False).encode()

    def wilds(self, root: Path, parts: dict[str, int]) -> Path:
        """`parts`: number of the split of each user; 0, 2 and 4 take turns for those of 0."""
        folder = unpack({"reviews.csv": self.content(), "splits/user.csv": b""}, root)
        self.splits, seen = [parts[user] for user in self.table["reviewerID"]], 0
        for place, split in enumerate(self.splits):
            if split == 0:
                seen += 1
                self.splits[place] = {3: 2, 6: 4}.get(seen % 7, 0)
        pd.DataFrame({"split": self.splits}).to_csv(folder / "splits/user.csv", index=False)
        return folder


def opinions() -> pd.DataFrame:
    """Rows of the sentiment file: three domains, of which one has titles."""
    rows = [
        (domain, str(n % 2), f"Title {n}" if domain == "books" and n % 3 else "",
         f"text {n} of {domain},\nwith lines")
        for domain, count in (("books", 12), ("imdb", 9), ("blog", 15)) for n in range(count)
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["domain", "label", "title", "text"])
    return frame.sample(frac=1, random_state=0, ignore_index=True)


def stand_in(monkeypatch, name: str, content: bytes) -> str:
    """Let the data set's file be this one; returns the file's name."""
    (file,) = (file for copy in data.card(name).copies for file in copy.files)
    change_card(monkeypatch, name, **{file.name: content})
    return file.name
