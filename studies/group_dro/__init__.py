"""Group DRO on CelebA, sentiment and Amazon: all methods with equal tuning, many seeds.

    python -m studies.group_dro heads --data celeba --output heads.jsonl
    python -m studies.group_dro networks --data celeba --setting finetune --output networks.jsonl

`heads` trains linear heads on features of a frozen network, ten fresh seeds of a method as a fleet,
with the settings that `fcco sweep` found. `networks` trains every weight on a GPU; it tunes first.
Settings are chosen on validation data of tuning seeds; fresh seeds have splits of their own.
"""
