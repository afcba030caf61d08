"""Rollout engines: one protocol (`base`), the embedded engine (`local`) that specifies it."""
