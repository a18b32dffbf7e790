"""Float32 and mixed precision side by side, and how large gradients are."""
