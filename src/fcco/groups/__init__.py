"""Groups: their means in a batch, and resumable samplers that draw the batches.

A batch has two levels: B1 blocks (groups, constraints) drawn uniformly without replacement out of
n, and B2 samples of each. `BlockSampler` draws the first level alone.
"""

from .holdout import HoldOut
from .means import GroupMeans, GroupMemberships, group_mean
from .mixture import Mixture
from .samplers import BlockSampler, GroupBatchSampler, PositiveBatchSampler, ResumableSampler

__all__ = [
    "BlockSampler", "GroupBatchSampler", "GroupMeans", "GroupMemberships", "HoldOut", "Mixture",
    "PositiveBatchSampler", "ResumableSampler", "group_mean",
]  # fmt: skip
