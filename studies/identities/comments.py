"""Wikipedia's talk page comments: toxic or not, which identities each names, features of MiniLM.

Every comment that names an identity is used, and a fixed random part of the others: 60,000
comments of all, three of eight, have features anyway, and of those outside it only the ones that
name an identity. So that overall figures are those of all comments, a comment that names no
identity has the weight n_all / n_kept of its label in its part; all others have weight 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from fcco_experiments import backbones, data
from fcco_experiments.data.grouped import sampled
from fcco_experiments.data.sources import digest
from numpy.typing import NDArray
from sklearn.feature_extraction.text import HashingVectorizer
from torch import Tensor

Kind = Literal["features", "tokens", "counts"]

PARTS = ("train", "val", "test")
RANDOM = 60_000  # comments that were drawn without looking at identities
TOKENS = 128

# Chosen on training data alone: each has at least 350 comments there that are not toxic, 120 or so
# in the test part, where a rate of 0.05 then has a standard error of at most 0.02.
WORDS = {
    "women": "woman women female females lady ladies girl girls",
    "men": "man men male males boy boys gentleman gentlemen",
    "LGBT": "gay gays homosexual homosexuals homosexuality lesbian lesbians bisexual bisexuals "
    "lgbt queer queers transgender transgendered transsexual transsexuals",
    "Christian": "christian christians christianity catholic catholics catholicism protestant "
    "protestants mormon mormons",
    "Muslim": "muslim muslims moslem moslems islam islamic",
    "Jewish": "jew jews jewish judaism",
    "black": "black blacks african africans",
    "white": "white whites caucasian caucasians",
    "East Asian": "asian asians chinese china japanese japan korean koreans korea vietnamese",
    "South Asian": "indian indians india pakistani pakistanis pakistan",
    "Middle Eastern": "arab arabs arabic iranian iranians iran persian persians iraqi iraqis iraq "
    "palestinian palestinians palestine israeli israelis israel",
    "Greek or Turkish": "greek greeks greece turk turks turkish turkey",
    "Balkan": "serb serbs serbian serbians serbia croat croats croatian croatians croatia bosnian "
    "bosnians bosnia albanian albanians albania macedonian macedonians macedonia bulgarian "
    "bulgarians bulgaria romanian romanians romania",
    "Russian": "russian russians russia",
    "East European": "polish pole poles poland ukrainian ukrainians ukraine hungarian hungarians "
    "hungary czech czechs",
    "German": "german germans germany",
    "French": "french france",
    "British or Irish": "british britain briton britons england scottish scots scotland welsh "
    "wales irish ireland",
    "American": "american americans america usa",
    "young": "young younger youth kid kids child children teen teens teenager teenagers",
    "old": "old older elderly",
    "disabled": "disabled disability disabilities handicapped blind deaf autistic autism mental "
    "mentally",
}


def named(texts: Iterable[str]) -> NDArray[np.bool_]:
    """Which identities each comment names, (comments, groups)."""
    group = {word: place for place, own in enumerate(WORDS.values()) for word in own.split()}
    rows = []
    for text in texts:
        found = np.zeros(len(WORDS), dtype=bool)
        found[[group[word] for word in re.findall("[a-z]+", text.lower()) if word in group]] = True
        rows.append(found)
    return np.array(rows).reshape(-1, len(WORDS))


@dataclass(frozen=True)
class Part:
    """Comments of one part of the data.

    Attributes:
        x: features, or token ids; (comments, width).
        y: 1.0 where toxic.
        groups: which identities each names, (comments, groups), boolean.
        weight: how many comments of the part each stands for in overall figures.
    """

    x: Tensor
    y: Tensor
    groups: Tensor
    weight: Tensor

    def to(self, device: str) -> Part:
        """On another device."""
        return Part(*(each.to(device) for each in vars(self).values()))


@cache
def load(kind: Kind, words: bool = False) -> dict[str, Part]:
    """The parts `train`, `val` and `test`; features are standardised by the training comments.

    Args:
        kind: see `read`.
        words: add to the features which identities a comment names.
    """
    arrays = read(kind)
    part, groups = torch.from_numpy(arrays["part"]), torch.from_numpy(arrays["groups"])
    if kind == "tokens":
        x = torch.from_numpy(arrays["x"].astype(np.int32))
    else:
        x = torch.from_numpy(arrays["x"].astype(np.float32))
        train = x[part == 0]
        x = (x - train.mean(0)) / train.std(0).clamp(min=1e-6)
        x = torch.cat([x, 2 * groups.float()], 1) if words else x
    y, weight = (torch.from_numpy(arrays[name].astype(np.float32)) for name in ("y", "weight"))
    rows = {name: part == place for place, name in enumerate(PARTS)}
    return {name: Part(x[own], y[own], groups[own], weight[own]) for name, own in rows.items()}


def read(kind: Kind) -> dict[str, NDArray]:
    """The comments that are used, as arrays `x`, `y`, `groups`, `weight` and `part` (0, 1 or 2).

    Args:
        kind: `x` are the features of the frozen MiniLM, token ids, or counts of words, which need
            no backbone and take seconds.
    """
    every = data.load_grouped("toxicity")
    drawn = data.load_grouped("toxicity", keep=RANDOM)
    y, part = (np.empty(len(every.samples), dtype=np.int64) for _ in range(2))
    for place, own in enumerate(every.cut(0).values()):
        y[own.rows], part[own.rows] = own.label, place
    texts = [str(every.samples[row]) for row in range(len(y))]
    groups, cell = named(texts), 3 * y + part
    first = sampled(torch.from_numpy(cell), RANDOM).numpy()  # the rows of `drawn`
    assert [texts[row] for row in first] == [drawn.samples[k] for k in range(len(first))]
    more = np.setdiff1d(np.flatnonzero(groups.any(1)), first)
    rows = np.concatenate([first, more])
    if kind == "counts":
        hashed: Any = HashingVectorizer(n_features=384, norm=None, alternate_sign=False)  # type: ignore[arg-type]
        x = hashed.transform(texts[row] for row in rows).log1p().toarray()
    elif kind == "tokens":
        both = tuple(texts[row] for row in rows)
        found: Any = backbones.encode("minilm", both, tokens=TOKENS)
        x = found.values.numpy()
    else:
        added = tuple(texts[row] for row in more)
        inputs = digest(*added)
        extra = replace(every, name="toxicity-identities", samples=added, inputs=inputs)
        both = [backbones.features("minilm", own, tokens=TOKENS) for own in (drawn, extra)]
        x = torch.cat([own.values for own in both]).numpy()
    weight = shares(groups, cell, rows)
    return {"x": x, "y": y[rows], "groups": groups[rows], "weight": weight, "part": part[rows]}


def shares(groups: NDArray[np.bool_], cell: NDArray, rows: NDArray) -> NDArray:
    """How many comments each of the chosen rows stands for.

    Args:
        groups: the identities of each comment; all that name one are among the rows.
        cell: label and part of each comment.
        rows: those that were chosen.
    """
    some, cells = np.any(groups, axis=1), int(cell.max()) + 1
    other = rows[~some[rows]]
    ratio = np.bincount(cell[~some], minlength=cells) / np.bincount(cell[other], minlength=cells)
    return np.where(some[rows], 1.0, ratio[cell[rows]])
