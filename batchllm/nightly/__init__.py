"""Runs that nobody watches: when they stop, what they leave behind, whom they tell, and how they are scheduled."""
