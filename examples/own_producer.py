"""Rows that a thread of your own brings, in chunks, in an order of its own; and what happens when one never comes.

python examples/own_producer.py
"""

import threading
import time

import torch

import tilestream as ts

ROWS, CHUNK = 4096, 512


def main() -> None:
    torch.manual_seed(0)
    source, w = torch.randn(ROWS, 1024), torch.randn(1024, 1024)
    x = torch.full_like(source, float("nan"))  # nothing has arrived
    arrival = ts.Arrival.uniform(CHUNK, ROWS // CHUNK, pivot=2)  # chunk 2 comes first, so the raster starts there

    def producer(chunks: list[int], epoch: int) -> None:
        for chunk in chunks:
            time.sleep(0.01)
            rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            x[rows] = source[rows]
            arrival.signal(chunk, epoch=epoch)

    threading.Thread(target=producer, args=([2, 3, 4, 5, 6, 7, 0, 1], arrival.epoch)).start()
    y = ts.matmul(x, w, arrival=arrival)
    print("largest difference from torch:", (y - source @ w).abs().max().item())

    epoch = arrival.advance()  # the next epoch: nothing has arrived yet
    threading.Thread(target=producer, args=([2, 3, 4, 6, 7, 0, 1], epoch)).start()  # chunk 5 never comes
    try:
        ts.matmul(x, w, arrival=arrival, deadline=0.5)
    except ts.ArrivalTimeout as error:
        print(error)
        print("chunk", error.chunk, "was missing; waited", f"{error.waited:.2f} s")


if __name__ == "__main__":
    main()
