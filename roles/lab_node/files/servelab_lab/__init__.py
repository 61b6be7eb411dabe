"""The lab's doubles: `pct`, the GPU driver with `nvidia-smi`, and the SGLang server. Standard library only."""
