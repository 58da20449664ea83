"""Group DRO: the average loss of the worst groups, on images, texts and vectors."""

from .config import GroupDRO as GroupDRO
