"""The backend of GPUs. `backend` is the entry; `libraries` runs before MXNet is imported."""
