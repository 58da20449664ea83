"""X-risks: losses of a score against other scores, as objectives for your own training loop.

| objective | maximises | block i | g_i | f |
|---|---|---|---|---|
| `AUC` | area under the ROC curve | the whole set | class means of h, h^2 | variances, margin |
| `AveragePrecision` | area under precision and recall | a positive | two ranks | -u_1/u_2 |
| `PartialAUC` | AUC up to a false positive rate | the whole set | mean of CVaR | u |
| `TwoWayPartialAUC` | AUC above a true positive rate too | a positive | CVaR | CVaR, by SONEX |
| `NDCG` | gain of ranked lists, or of their top | a relevant item | its rank | -c / log2(1 + u) |
| `ListwiseCrossEntropy` | likelihood of relevant items | such an item | sum of exp | log(1 + u) |
| `MultiInstanceAUC` | AUC of bags of instances | a bag | mean exp | nested: as `AUC` |

`warm_start` trains with cross-entropy first, which AP and partial AUC want.
"""

from .base import warm_start
from .binary import AUC, AveragePrecision, BinaryRisk, MultiInstanceAUC
from .pairs import PairLoss
from .partial_auc import PartialAUC, TwoWayPartialAUC
from .ranking import NDCG, ListwiseCrossEntropy

__all__ = [
    "AUC", "NDCG", "AveragePrecision", "BinaryRisk", "ListwiseCrossEntropy", "MultiInstanceAUC",
    "PairLoss", "PartialAUC", "TwoWayPartialAUC", "warm_start",
]  # fmt: skip
