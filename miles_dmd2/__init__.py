"""DMD2 distillation of flow-matching models at cluster scale."""

__version__ = "0.1.0"
