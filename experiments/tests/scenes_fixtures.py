"""Small data sets in the layouts of the weather photos and of BDD100K."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = (24, 32)  # height, width of a frame


def picture(number: int, size: tuple[int, int] = (128, 128)) -> Image.Image:
    """Fields of random brightness: two numbers never give nearly the same picture."""
    fields = np.random.RandomState(number).randint(0, 256, size=(8, 8, 3)).astype(np.uint8)
    return Image.fromarray(fields).resize((size[1], size[0]), Image.Resampling.NEAREST)


def saved(image: Image.Image, form: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def unpack(members: dict[str, bytes], root: Path) -> Path:
    for name, content in members.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


FOLDERS = {
    "sunny": 6, "shine": 5, "cloudy": 4, "clouds": 5, "rainy": 3, "rain": 4, "snowy": 7, "fog": 5,
    "fog_driving": 6, "storm": 4, "sunrise": 3,
}  # fmt: skip
"""Photos in each."""


def photos() -> dict[str, bytes]:
    """Path and content of every photo, in no order of names; all different."""
    found: dict[str, bytes] = {}
    for folder, count in FOLDERS.items():
        for number in range(count):
            name = f"weather/{folder}/{(7 * number) % 10}{folder}.jpg"
            found[name] = saved(picture(len(found)), "JPEG", quality=95)
    return found


FRAMES: dict[str, dict[str | None, int]] = {
    "train": {"clear": 12, "overcast": 9, "rainy": 8, "foggy": 4, "undefined": 3, None: 2},
    "val": {"clear": 5, "overcast": 4, "rainy": 4, "foggy": 3, "undefined": 2, None: 1},
}


class Drives:
    """Frames of a train and a val split with their attributes, shuffled."""

    def __init__(self) -> None:
        random = np.random.RandomState(3)
        self.rows: dict[str, list[dict]] = {}
        number = 0
        for split, counts in FRAMES.items():
            words = [word for word, count in counts.items() for _ in range(count)]
            self.rows[split] = []
            for word in (words[place] for place in random.permutation(len(words))):
                time = ("daytime", "night")[number % 2]
                attributes = {"weather": word, "scene": "highway", "timeofday": time}
                record = {"name": f"{number:08x}-{number:08x}.jpg", "timestamp": 10000}
                if word is not None or number % 2:  # no attributes, or no value
                    record["attributes"] = attributes
                if number % 3:
                    box = {"x1": 0.5, "y1": 1, "x2": 9, "y2": 7}
                    inner = {"occluded": False, "weather": "a box has none"}
                    record["labels"] = [{"category": "car", "attributes": inner, "box2d": box}]
                self.rows[split].append(record)
                number += 1

    def weather(self, path: str) -> str | None:
        """By the path of an image, such as train/x.jpg."""
        split, _, name = path.partition("/")
        (record,) = (each for each in self.rows[split] if each["name"] == name)
        return record.get("attributes", {}).get("weather")

    def names(self, split: str, weather: str | None) -> list[str]:
        names = [each["name"] for each in self.rows[split]]
        return [name for name in names if self.weather(f"{split}/{name}") == weather]

    def images(self, splits: tuple[str, ...] = ("train", "val")) -> dict[str, bytes]:
        return {
            f"images/100k/{split}/{each['name']}": saved(
                picture(int(each["name"][:8], 16), SIDE), "JPEG", quality=95
            )
            for split in splits
            for each in self.rows[split]
        }

    def labels(self, splits: tuple[str, ...] = ("train", "val")) -> dict[str, bytes]:
        return {
            f"labels/det_20/det_{split}.json": json.dumps(self.rows[split]).encode()
            for split in splits
        }

    def write(self, root: Path) -> Path:
        unpack({**self.images(), **self.labels()}, root / "bdd100k")
        return root

    def archive(self) -> bytes:
        """The val split as the subset has it."""
        own = {**self.images(("val",)), **self.labels(("val",))}
        return tar({f"bdd100k/{name}": content for name, content in own.items()})
