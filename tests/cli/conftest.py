from tests.tiny_qwen import tiny_qwen

__all__ = ["tiny_qwen"]
