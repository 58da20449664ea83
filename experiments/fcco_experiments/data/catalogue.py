"""Every data set, with what a user wants to know before taking it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import (
    amazon,
    bdd100k,
    camelyon17,
    celeba,
    clusters,
    gaussian,
    propublica,
    scenes,
    sentiment,
    uci,
    weather,
)
from .files import DataFile
from .folders import Copy, Layout
from .grouped import GroupedData
from .parts import FairnessData

__all__ = ["DATA_SETS", "DataSet"]


@dataclass(frozen=True)
class DataSet:
    """A data set that can be loaded by its name.

    Args:
        name: of the data set.
        title: what it is, in a few words.
        rows: how many there are, in words.
        licence: who may do what with it.
        citation: whom to cite.
        loader: the function that reads it.
        files: what the loader reads, all of them; they can be fetched.
        copies: what the loader reads, any one of them. They cannot be fetched, unless the package
            `wilds` does. Generated data have neither files nor copies.
        grouped: the loader gives `GroupedData`.
    """

    name: str
    title: str
    rows: str
    licence: str
    citation: str
    loader: Callable[..., FairnessData | GroupedData]
    files: tuple[DataFile, ...] = ()
    copies: tuple[Layout | Copy, ...] = ()
    grouped: bool = False

    @property
    def generated(self) -> bool:
        """No file is read."""
        return not (self.files or self.copies)

    @property
    def how(self) -> tuple[str, ...]:
        """Ways to come by what cannot be fetched."""
        return tuple(copy.how for copy in self.copies)


BDD100K = (
    "Yu et al. (2020), BDD100K: a diverse driving dataset for heterogeneous multitask learning, "
    "CVPR"
)
DATA_SETS: dict[str, DataSet] = {
    entry.name: entry
    for entry in (
        DataSet(
            "adult",
            "UCI Adult: income above 50K, groups by sex",
            "32,561 train, 16,281 test",
            "CC BY 4.0",
            "Becker and Kohavi (1996), Adult, UCI Machine Learning Repository, doi 10.24432/C5XW20",
            uci.adult,
            uci.FILES,
        ),
        DataSet(
            "compas",
            "ProPublica COMPAS: arrest within two years, groups Caucasian and others",
            "4,938 train, 1,234 test",
            "none given; public records published by ProPublica",
            "Angwin, Larson, Mattu and Kirchner (2016), Machine bias, ProPublica",
            propublica.compas,
            propublica.FILES,
        ),
        DataSet(
            "synthetic",
            "Gaussian features, two groups with different base rates",
            "4,000 train, 2,000 test (as asked)",
            "generated, MIT",
            "none",
            gaussian.synthetic,
        ),
        DataSet(
            "celeba",
            "CelebA: blond hair, 16 groups by attractive, mouth open, man, blond",
            "202,599 images, or the first 10,000 of them",
            "non-commercial research, no redistribution",
            "Liu, Luo, Wang and Tang (2015), Deep learning face attributes in the wild, ICCV",
            celeba.read_celeba,
            copies=celeba.COPIES,
            grouped=True,
        ),
        DataSet(
            "camelyon17",
            "Camelyon17-WILDS: tumour in patches of lymph nodes, groups by hospital and slide",
            "302,436 train, 34,904 validation, 85,054 test",
            "CC0",
            "Bandi et al. (2019), From detection of individual metastases to classification of "
            "lymph node status at the patient level: the CAMELYON17 challenge, IEEE TMI; "
            "Koh et al. (2021), WILDS, ICML",
            camelyon17.read_camelyon17,
            copies=camelyon17.COPIES,
            grouped=True,
        ),
        DataSet(
            "amazon",
            "Amazon reviews: 1 to 5 stars, groups by user",
            "445,602 reviews of 3,920 users (WILDS), or 10,450 of 1,897",
            "none given; the authors ask for research use",
            "Ni, Li and McAuley (2019), Justifying recommendations using distantly-labeled reviews "
            "and fine-grained aspects, EMNLP; Koh et al. (2021), WILDS, ICML",
            amazon.read_amazon,
            copies=amazon.COPIES,
            grouped=True,
        ),
        DataSet(
            "sentiment",
            "Opinions from 7 sources, positive or negative; groups by source and label",
            "14,000 texts",
            "none given; research use",
            "Blitzer, Dredze and Pereira (2007), Biographies, Bollywood, boom-boxes and blenders, "
            "ACL; Ryu and Lee (2020), Knowledge distillation for BERT unsupervised domain "
            "adaptation",
            sentiment.read_sentiment,
            copies=sentiment.COPIES,
            grouped=True,
        ),
        DataSet(
            "grouped-synthetic",
            "Gaussian vectors, 12 groups whose labels follow different rules",
            "3,000 (as asked)",
            "generated, MIT",
            "none",
            clusters.grouped_synthetic,
            grouped=True,
        ),
        DataSet(
            "weather",
            "Photos of weather: clear, cloudy, rainy, snowy or foggy, groups by class",
            "1,933 different photos (2,470 with storms and sunrises)",
            "the rights are with the photographers",
            "none; photos of the web, the fog partly of Kenk and Hassaballah (2020), DAWN: "
            "vehicle detection in adverse weather nature dataset",
            weather.read_weather,
            copies=weather.COPIES,
            grouped=True,
        ),
        DataSet(
            "bdd100k",
            "BDD100K: weather in frames of drives, groups by class",
            "69,863 train, 10,000 test; 61,744 and 8,843 with known weather",
            "BDD100K licence: education, research and not-for-profit use, with its notice",
            BDD100K,
            bdd100k.read_bdd100k,
            copies=bdd100k.COPIES,
            grouped=True,
        ),
        DataSet(
            "bdd100k-subset",
            "BDD100K: weather in frames of drives, a part of the val images at 256 x 144",
            "967 frames, 841 of the five usual classes",
            "BDD100K licence: education, research and not-for-profit use, with its notice",
            BDD100K,
            bdd100k.read_bdd100k_subset,
            copies=bdd100k.SUBSET,
            grouped=True,
        ),
        DataSet(
            "scenes-synthetic",
            "Gaussian vectors in five classes, the last of which overlaps two others",
            "2,000 (as asked)",
            "generated, MIT",
            "none",
            scenes.scenes_synthetic,
            grouped=True,
        ),
    )
}
