"""Percentiles of times that were only counted by their power of two. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# Bucket b counts times of less than 2**b ns and at least half of that: no time in ns is too long for 64.
BUCKETS = 64


def percentile(buckets: Sequence[int], share: float, longest: int) -> float:
    """The time in ns that `share` (0 to 1) of the counted ones don't exceed; `longest` bounds it.

    Within a bucket times are taken to be spread evenly on a logarithmic scale, so the answer is right to a factor of
    two and, for the smooth distributions of practice, much better.
    """
    left = share * sum(buckets)
    for bucket, many in enumerate(buckets):
        if many and left <= many:
            return min(float(longest), 2 ** (bucket - 1 + max(left, 0.0) / many)) if bucket else 0.0
        left -= many
    return float(longest)
