"""What mixed precision does to a model, and why. Imports `convert` and below."""
