"""Statistics of repeated measurements. Runs on the controller only (numpy, scipy); docs/statistics.md has the reasons.

The server's start is what varies, so a *repetition* is one start of each arm, and every figure is a paired one: the
logarithm of (other / base) within a repetition. The requests of one run say nothing about the next start and are
never used for an interval here.
"""
