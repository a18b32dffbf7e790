"""The backend of GPUs: `backend` has its class; `libraries` runs before MXNet is imported."""
