"""What a sample is worth: a constant 0, or what the user's own function says."""

from miles_dmd2.rewards.custom import RewardError, Rewards, check_reward

__all__ = ["RewardError", "Rewards", "check_reward"]
