"""Group DRO on CelebA, sentiment and Amazon: all methods with equal tuning, many seeds."""
