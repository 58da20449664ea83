"""Groups: their means in a batch, and resumable samplers that draw the batches.

A batch of a coupled compositional problem has two levels: B1 blocks (groups, constraints) drawn
uniformly without replacement out of n, and B2 samples of each. `GroupBatchSampler` draws such
batches, `group_mean` turns the losses of one into the inner values g_i(w; B_i), and
`BlockSampler` draws the first level alone. `PositiveBatchSampler` draws batches with a fixed number
of rare positives. Where samples are in several groups, `GroupMemberships` has an item for each pair
of a sample and one of its groups.
"""

from .means import GroupMeans, GroupMemberships, group_mean
from .samplers import BlockSampler, GroupBatchSampler, PositiveBatchSampler, ResumableSampler

__all__ = [
    "BlockSampler", "GroupBatchSampler", "GroupMeans", "GroupMemberships", "PositiveBatchSampler",
    "ResumableSampler", "group_mean",
]  # fmt: skip
