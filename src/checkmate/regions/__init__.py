"""Activation checkpointing by regions: the policy nearest to a plan, for users who cannot run the plan."""

from checkmate.regions.answer import RegionPolicy, choose_policy

__all__ = ["RegionPolicy", "choose_policy"]
