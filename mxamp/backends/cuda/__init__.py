"""The GPU backend: `backend` holds its class, `libraries` the code that runs before MXNet."""
