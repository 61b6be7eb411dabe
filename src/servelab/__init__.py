"""Measure and compare ways of serving a large language model with SGLang on PCIe GPUs."""

__version__ = "0.1.0"
