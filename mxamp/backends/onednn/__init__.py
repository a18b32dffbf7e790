"""CPUs, whose fast kernels are oneDNN's. `backend` is the entry; `cpu` needs no MXNet."""
