"""Deterministic runs of the policies of `laminar.core` under faults: virtual time, seeded chance, no processes."""
