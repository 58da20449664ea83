"""The learning rate over training."""

from __future__ import annotations

from .config import GroupDRO

__all__ = ["factor"]


def factor(config: GroupDRO, epoch: float) -> float:
    """What the learning rate is multiplied by after so many epochs.

    Example:
        >>> config = GroupDRO(data="celeba", epochs=9, schedule="step", decay=0.5, decay_epochs=3)
        >>> [factor(config, epoch) for epoch in (0, 2.9, 3, 6)]
        [1.0, 1.0, 0.5, 0.25]
        >>> config = GroupDRO(data="amazon", epochs=4, schedule="linear", warmup_epochs=1)
        >>> [factor(config, epoch) for epoch in (0, 0.5, 1, 2.5, 4)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "step":
        return config.decay ** (int(epoch) // config.decay_epochs)
    warm = config.warmup_epochs
    if epoch < warm:
        return epoch / warm
    return max(0.0, (config.epochs - epoch) / (config.epochs - warm))
