"""The GPU backend: `backend` holds its class; `libraries` runs before MXNet is imported."""
