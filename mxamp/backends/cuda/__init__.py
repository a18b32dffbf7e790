"""GPUs. `backend` is the entry; `libraries` needs no MXNet, and prepares its import."""
