"""Start workers and MXNet's parameter server on this machine.

    python examples/launch_workers.py -n 2 python examples/train_on_workers.py
    python examples/launch_workers.py -n 2 mxamp run train.py

Your program trains with kvstore="dist_sync". Each line of its output begins with the worker's rank.
If one process fails, all end, with its exit status.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

SERVE = [sys.executable, "-W", "ignore", "-c", "import mxamp"]  # serves until it is killed


def free_ports(count):
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return sorted(str(probe.getsockname()[1]) for probe in sockets)


def start(name, command, variables):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**variables, "DMLC_ROLE": name.split()[0]}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    threading.Thread(target=copy_lines, args=(name, process.stdout)).start()
    return process


def copy_lines(name, lines):
    for line in lines:
        print(f"[{name}] {line}", end="", flush=True)


def first_failure(workers, processes):
    """Wait until a process fails or all workers succeed; return the exit status."""
    while True:
        for status in filter(None, [process.poll() for process in processes]):
            return status if status > 0 else 128 - status  # -9: killed by signal 9
        if all(worker.poll() == 0 for worker in workers):
            return 0
        time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--workers", type=int, default=2, help="default: 2")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    port, server_port, *ports = free_ports(2 + options.workers)
    threads = max(os.cpu_count() // options.workers, 1)  # the workers share the cores
    shared = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **os.environ}
    shared.update(DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=port, DMLC_INTERFACE="lo")
    shared.update(DMLC_NODE_HOST="127.0.0.1", DMLC_NUM_SERVER="1")
    shared.update(DMLC_NUM_WORKER=str(options.workers))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    processes = []
    try:
        processes.append(start("scheduler", SERVE, shared))
        processes.append(start("server", SERVE, {**shared, "PORT": server_port}))
        for rank, own in enumerate(ports):  # MXNet ranks the workers by their ports
            variables = {**shared, "PORT": own, "DMLC_WORKER_ID": str(rank)}
            processes.append(start(f"worker {rank}", options.command, variables))
        sys.exit(first_failure(processes[2:], processes))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
