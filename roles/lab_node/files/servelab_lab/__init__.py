"""The lab's doubles: `pct`, the GPU driver with `nvidia-smi`, and the SGLang server. Standard library, Python 3.11 or newer."""
