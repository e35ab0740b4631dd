"""torch.distributed.broadcast over gloo: rank 0 has the bytes, every rank wants them. One JSON list of seconds.

    python benchmarks/peers/gloo_broadcast.py --bytes 33554432 --repeats 3 --sites '[["127.0.0.1", null], ...]'

Each site (address, network namespace or null) is one rank, the first is the source. All of them get ready, then wait
for a line on standard input.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

CLONE_NEWNET = 0x40000000
PORT = 29877


def rank_main(
    pipe: Connection, rank: int, size: int, source: str, namespace: str | None, num_bytes: int, repeats: int
) -> None:
    if namespace is not None:
        with open(f"/var/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0, namespace
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if namespace is None else "eth0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{source}:{PORT}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    pipe.send("ready")
    pipe.recv()
    weights = torch.full((num_bytes,), 1 if rank == 0 else 0, dtype=torch.uint8)
    times: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        dist.barrier()
        began_s = time.monotonic()
        dist.broadcast(weights, 0)
        times.append((began_s, time.monotonic()))
    assert int(weights[-1]) == 1
    pipe.send(times[1:])
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sites", type=json.loads, required=True)
    args = parser.parse_args()
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank, (_, namespace) in enumerate(args.sites):
        ours, theirs = fork.Pipe()
        arguments = (theirs, rank, len(args.sites), args.sites[0][0], namespace, args.bytes, args.repeats)
        process = fork.Process(target=rank_main, args=arguments, daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        assert pipe.poll(120) and pipe.recv() == "ready", "a rank does not start"
    input()
    for pipe in pipes:
        pipe.send("go")
    ranks = []
    for pipe in pipes:
        assert pipe.poll(120), "a rank does not answer"
        ranks.append(pipe.recv())
    print(json.dumps([max(end_s for _, end_s in each) - each[0][0] for each in zip(*ranks, strict=True)]))
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
