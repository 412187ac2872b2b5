"""Percentiles of times that were only counted: by their power of two, or by eighths of it. Pure."""

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


# Of each power of two, so many buckets.
_PARTS = 8


class Times:
    """Counts times in ns in constant memory, so that a percentile is right to a sixteenth."""

    def __init__(self) -> None:
        self.count = self.total = self.longest = 0
        self._buckets: dict[int, int] = {}

    def add(self, took: int) -> None:
        self.count += 1
        self.total += took
        self.longest = max(self.longest, took)
        shift = max(took.bit_length() - 4, 0)
        bucket = shift * _PARTS + (took >> shift)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def join(self, other: Times) -> None:
        """Count what `other` has counted, too."""
        self.count += other.count
        self.total += other.total
        self.longest = max(self.longest, other.longest)
        for bucket, many in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + many

    def percentile(self, share: float) -> float:
        """The time in ns that `share` (0 to 1) of the counted ones don't exceed, about; 0 where there are none."""
        left = share * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                shift = max(bucket // _PARTS - 1, 0)
                return min((bucket - shift * _PARTS + 0.5) * (1 << shift), float(self.longest))
        return float(self.longest)
