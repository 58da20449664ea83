"""Morgan fingerprints of molecules, given as SMILES."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data.grouped import Samples, Vectors
from ..data.molecules import molecule, rdkit_module
from .base import Backbone, Kind, Options, Spec

BITS, RADIUS = 1024, 2


class Fingerprints(Backbone):
    """From the numbers of the bits that are set, each with 1 added and padded with 0, to bits."""

    kind: Kind = "text"
    width = BITS

    def forward(self, batch: Tensor) -> Tensor:
        """The bits as 0.0 and 1.0."""
        bits = torch.zeros(len(batch), BITS + 1, device=batch.device)
        return bits.scatter_(1, batch.long(), 1.0)[:, 1:]


class MorganSpec(Spec):
    """Morgan fingerprints; nothing in them is trained or downloaded."""

    def build(self, options: Options) -> Fingerprints:
        return Fingerprints()

    def checksum(self, options: Options) -> str:
        return f"radius {RADIUS}, {BITS} bits, rdkit {rdkit_module('rdBase').rdkitVersion}"

    def encode(self, samples: Samples, options: Options) -> Vectors:
        """The bits of each molecule as int32 (N, most bits of one molecule); none is cut off."""
        generators = rdkit_module("Chem.rdFingerprintGenerator")
        generator = generators.GetMorganGenerator(radius=RADIUS, fpSize=BITS)
        found = []
        for row in range(len(samples)):
            bits = list(generator.GetFingerprint(molecule(str(samples[row]))).GetOnBits())
            found.append(torch.tensor(bits, dtype=torch.int32) + 1)
            if options.progress is not None and (row % 256 == 0 or row + 1 == len(samples)):
                options.progress("molecules to fingerprints", row + 1, len(samples))
        return Vectors(torch.nn.utils.rnn.pad_sequence(found, batch_first=True))


MOLECULES = (MorganSpec("morgan", "text"),)
