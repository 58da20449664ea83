"""Small data sets in the exact layouts of CelebA, Camelyon17-WILDS and Amazon-WILDS."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
from data_fixtures import change_card, put
from fcco_experiments import data
from PIL import Image
from scenes_fixtures import tar

__all__ = ["Faces", "Patches", "Reviews", "opinions", "opinions_content", "put", "stand_in"]

ATTRIBUTES = (
    *("5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald", "Bangs"),
    *("Big_Lips", "Big_Nose", "Black_Hair", "Blond_Hair", "Blurry", "Brown_Hair"),
    *("Bushy_Eyebrows", "Chubby", "Double_Chin", "Eyeglasses", "Goatee", "Gray_Hair"),
    *("Heavy_Makeup", "High_Cheekbones", "Male", "Mouth_Slightly_Open", "Mustache"),
    *("Narrow_Eyes", "No_Beard", "Oval_Face", "Pale_Skin", "Pointy_Nose", "Receding_Hairline"),
    *("Rosy_Cheeks", "Sideburns", "Smiling", "Straight_Hair", "Wavy_Hair", "Wearing_Earrings"),
    *("Wearing_Hat", "Wearing_Lipstick", "Wearing_Necklace", "Wearing_Necktie", "Young"),
)
FACE = (24, 20)  # height, width


def image(number: int, size: tuple[int, int] = FACE, form: str = "JPEG") -> bytes:
    """One colour, by which the image is known again."""
    stream = io.BytesIO()
    colour = (number % 64 * 4, number // 64 * 4, 128)
    Image.new("RGB", (size[1], size[0]), colour).save(stream, form, quality=100)
    return stream.getvalue()


class Faces:
    """Images with 40 attributes; group g of the 16 has 3 + g % 4 of them, in random order."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.RandomState(seed)
        groups = [g for g in range(16) for _ in range(3 + g % 4)]
        random.shuffle(groups)
        self.groups = groups
        self.names = [f"{number:06d}.jpg" for number in range(1, len(groups) + 1)]
        self.table = []
        for group in groups:
            values = dict(zip(ATTRIBUTES, random.choice([-1, 1], size=40).tolist(), strict=True))
            order = ("Attractive", "Mouth_Slightly_Open", "Male", "Blond_Hair")
            for place, name in enumerate(order):
                values[name] = 1 if group >> (3 - place) & 1 else -1
            self.table.append([values[name] for name in ATTRIBUTES])

    def text(self) -> str:
        rows = (
            f"{name} " + " ".join(f"{value:2d}" for value in row)
            for name, row in zip(self.names, self.table, strict=True)
        )
        head = f"{len(self.names)}\n{' '.join(ATTRIBUTES)} \n"  # the real header ends in a space
        return head + "".join(f"{row}\n" for row in rows)

    def _images(self, folder: Path) -> None:
        (folder / "img_align_celeba").mkdir(parents=True)
        for number, name in enumerate(self.names):
            (folder / "img_align_celeba" / name).write_bytes(image(number))

    def official(self, folder: Path) -> Path:
        self._images(folder)
        (folder / "list_attr_celeba.txt").write_text(self.text())
        partition = "".join(f"{name} 0\n" for name in self.names)
        (folder / "list_eval_partition.txt").write_text(partition)
        return folder

    def wilds(self, root: Path) -> Path:
        folder = root / "celebA_v1.0"
        self._images(folder)
        (folder / "RELEASE_v1.0.txt").write_text("")
        rows = [[name, *row] for name, row in zip(self.names, self.table, strict=True)]
        write_csv(folder / "list_attr_celeba.csv", [["image_id", *ATTRIBUTES], *rows])
        partition = [["image_id", "partition"], *([name, 0] for name in self.names)]
        write_csv(folder / "list_eval_partition.csv", partition)
        return folder

    def archive(self) -> bytes:
        images = {f"celeba/img_align_celeba/{n}": image(k) for k, n in enumerate(self.names)}
        return tar({"celeba/list_attr_celeba.txt": self.text().encode(), **images})


def write_csv(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows(rows)
    return path


class Patches:
    """Two slides of hospital 0, one each of 1 to 4; ten patches of each, two of them set aside."""

    header = ("", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
    slides = ((0, 4), (0, 7), (1, 11), (2, 23), (3, 31), (4, 40))

    def __init__(self) -> None:
        aside = "validation of the training hospitals"
        self.counts = {"train": 32, aside: 8, "validation": 10, "test": 10}
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
        folder = root / "camelyon17_v1.0"
        (folder / "patches").mkdir(parents=True)
        (folder / "RELEASE_v1.0.txt").write_text("")
        self.table(folder)
        for number, row in enumerate(self.rows):
            path = folder / "patches" / self.path(row)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(image(number, (96, 96), "PNG"))
        return folder

    def table(self, folder: Path) -> None:
        rows = [[number, *row] for number, row in enumerate(self.rows)]
        write_csv(folder / "metadata.csv", [self.header, *rows])


COLUMNS = (
    *("reviewerID", "asin", "overall", "reviewTime", "unixReviewTime", "reviewText", "summary"),
    *("verified", "category", "reviewYear"),
)


class Reviews:
    """Reviews of users, shuffled; texts hold what csv must quote."""

    def __init__(self, counts: dict[str, int], seed: int = 0) -> None:
        random = np.random.RandomState(seed)
        users = [user for user, count in counts.items() for _ in range(count)]
        random.shuffle(users)
        self.rows = []
        for number, user in enumerate(users):
            text = f'review {number}, "good",\nand more'
            stars = float(random.randint(1, 6))
            self.rows.append(
                [user, "B0", stars, "09 1, 2016", 1472688000, text, "Five", True, "Beauty", 2016]
            )

    def content(self) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        writer.writerows([COLUMNS, *self.rows])
        return text.getvalue().replace('"True"', "True").encode()

    def wilds(self, root: Path, parts: dict[str, int]) -> Path:
        """`parts`: number of the split of each user; 0, 2 and 4 take turns for those of 0."""
        folder = root / "amazon_v2.1"
        (folder / "splits").mkdir(parents=True)
        (folder / "RELEASE_v2.1.txt").write_text("")
        (folder / "reviews.csv").write_bytes(self.content())
        self.splits = [parts[row[0]] for row in self.rows]
        seen = 0
        for place, split in enumerate(self.splits):
            if split == 0:
                seen += 1
                self.splits[place] = {3: 2, 6: 4}.get(seen % 7, 0)
        write_csv(folder / "splits" / "user.csv", [["split"], *([own] for own in self.splits)])
        return folder


def opinions(seed: int = 0) -> list[list[str]]:
    """Rows of the sentiment file: three domains, of which one has titles."""
    random = np.random.RandomState(seed)
    rows = []
    for domain, count in (("books", 12), ("imdb", 9), ("blog", 15)):
        for number in range(count):
            titled = domain == "books" and number % 3 > 0
            label = str(number % 2)
            body = f"text {random.randint(10**6)} of {domain},\nwith lines"
            rows.append([domain, label, "", "", f"Title {number}" if titled else "", body])
    random.shuffle(rows)
    return rows


def opinions_content(rows: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([["domain", "label", "rating", "asin", "title", "text"], *rows])
    return text.getvalue().encode()


def stand_in(monkeypatch, name: str, content: bytes) -> str:
    """Let the data set's file be this one; returns the file's name."""
    (file,) = (file for copy in data.card(name).copies for file in copy.files)
    change_card(monkeypatch, name, **{file.name: content})
    return file.name
