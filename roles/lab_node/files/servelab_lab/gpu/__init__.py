"""Simulated GPUs: the daemon that plays the kernel driver, `nvidia-smi`, and `claim` for who plays a GPU process."""

from .claim import Claim, claim

__all__ = ["Claim", "claim"]
