"""The backend of CPUs, on oneDNN's kernels. `backend` is the entry; `cpu` needs no MXNet."""
