"""The CPU backend, on oneDNN: `backend` holds its class; `cpu` works without MXNet."""
