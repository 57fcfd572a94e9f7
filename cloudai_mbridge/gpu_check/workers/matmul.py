"""Measure this GPU's throughput in a large bf16 matrix product: the reference peak of training steps."""

import json
import statistics

import torch

SIZE = 8192
WARM_UP = 5
PRODUCTS = 20
ROUNDS = 5


def main() -> None:
    # Random, not zeros: products of zeros draw less power and run at higher clocks.
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(WARM_UP):
        torch.matmul(a, b)
    seconds = [timed(a, b) for _ in range(ROUNDS)]
    rate = 2 * SIZE**3 / statistics.median(seconds) / 1e12
    print(json.dumps({"size": SIZE, "dtype": "bf16", "tflops": rate, "rounds": ROUNDS, "products": PRODUCTS}))


def timed(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the seconds per product, over a round of products, by the device's own clock."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(PRODUCTS):
        torch.matmul(a, b)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / PRODUCTS


if __name__ == "__main__":
    main()
