"""Model families: one adapter per family behind `ModelAdapter`, chosen by the checkpoint's model_index.json."""
