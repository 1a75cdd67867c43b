"""The bucketed sample store of regression-and-learned.md section 0.3, written as the page describes it."""

import math
from collections import deque


class ReferenceSampler:
    def __init__(self, bins, max_observations, fixed=None):
        self.bins = bins
        self.max_observations = max_observations
        self.fixed = fixed is not None
        low, high = fixed if fixed else ([math.inf] * len(bins), [-math.inf] * len(bins))
        self.low, self.high = list(low), list(high)
        self.buckets = {}

    def key(self, x):
        key = []
        for v, low, high, bins in zip(x, self.low, self.high, self.bins, strict=True):
            key.append(0 if high <= low else min(max(math.trunc((v - low) / (high - low) * bins), 0), bins - 1))
        return tuple(key)

    def rows(self):
        return [row for key in sorted(self.buckets) for row in self.buckets[key]]

    def insert(self, x, payload):
        if self.fixed and any(not low <= v <= high for v, low, high in zip(x, self.low, self.high, strict=True)):
            return
        if not self.fixed:
            low = [min(a, v) for a, v in zip(self.low, x, strict=True)]
            high = [max(a, v) for a, v in zip(self.high, x, strict=True)]
            if (low, high) != (self.low, self.high):
                old = self.rows()
                self.low, self.high, self.buckets = low, high, {}
                for row in old:
                    self.buckets.setdefault(self.key(row[0]), deque()).append(row)
        self.buckets.setdefault(self.key(x), deque()).append((x, payload))
        if sum(map(len, self.buckets.values())) > self.max_observations:
            fattest = max(self.buckets, key=lambda key: (len(self.buckets[key]), key))
            self.buckets[fattest].popleft()
            if not self.buckets[fattest]:
                del self.buckets[fattest]
