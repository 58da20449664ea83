"""X-risks: average precision, partial AUC and NDCG."""
