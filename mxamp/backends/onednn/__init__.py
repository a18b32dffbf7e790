"""The backend of CPUs, on oneDNN: `backend` has its class; `cpu` doesn't import MXNet."""
