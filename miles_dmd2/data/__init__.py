"""Prompts: the only data that DMD2 with backward simulation reads."""
