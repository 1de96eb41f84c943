"""Hypothesis without a clock: how long an example takes says more about the machine than about the code."""

from hypothesis import settings

settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
