"""llama.cpp's own HTTP server, as a process: ``python -m benchmarks.generation.llama_server FILE --threads 2 ...``.

The first line out is a JSON object: its address, and for which processor it was compiled. It ends with its standard
input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys


def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library prints to the standard output
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = given.file
    params.n_parallel, params.n_ctx = given.sequences, given.sequences * given.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    params.cache_ram_mib = 0  # no prompt comes again: nothing of ended ones need be copied aside
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address, "system": xllamacpp.get_system_info()}), file=answers)
    sys.stdin.read()
    os._exit(0)  # without the ends of threads that wait for requests


if __name__ == "__main__":
    main()
