"""What this machine's products reach: python -m tests.bench.peak prints {"gflops", "threads", "torch", "processor"} as JSON.

A process of its own: a child's peak memory, as the system counts it, starts from that of the process that started it.
"""

import json
import time

import torch

from engine.matmul import processor


def products():
    """GFLOP/s of a large float32 product on this machine's threads, the fastest of oneDNN's and of torch's own."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    kinds = [torch.mm]
    if torch.backends.mkldnn.is_available():
        kinds.append(lambda a, b: torch.ops.mkldnn._linear_pointwise.default(a, b, None, "none", [], ""))
    best = float("inf")
    for product in kinds * 6:
        started = time.perf_counter()
        product(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * 2048**3 / best / 1e9


if __name__ == "__main__":
    print(json.dumps({"gflops": products(), "threads": torch.get_num_threads(), "torch": torch.__version__, "processor": processor()}))
