"""Host memory streams to a GPU while the matmul that reads it runs; and what happens when a chunk never comes.

python examples/stream_to_gpu.py
"""

import sys

import torch

import tilestream as ts

M, N, K = 8192, 8192, 8192


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this example needs a GPU; examples/own_producer.py is its twin for the CPU")
    torch.manual_seed(0)
    host = torch.randn(M, K).to(torch.bfloat16).pin_memory()
    w = torch.randn(K, N, device="cuda").to(torch.bfloat16)

    with ts.stream_in(host) as x:  # every copy and every signal is issued; none is waited for
        y = ts.matmul(x.tensor, w, arrival=x.arrival)
        x.wait()
    want = host.cuda() @ w
    print("largest difference from torch:", ((y - want).abs().max() / want.abs().max()).item(), "of the largest value")

    # The same by hand, with the last chunk left out.
    arrival = ts.Arrival.uniform(rows_per_chunk=1024, num_chunks=8, pivot=2, device="cuda")
    a = torch.full((M, K), float("nan"), device="cuda", dtype=torch.bfloat16)  # nothing has arrived
    copies = torch.cuda.Stream()
    copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        for chunk in (2, 3, 4, 5, 6, 7, 0):
            rows = slice(chunk * 1024, (chunk + 1) * 1024)
            a[rows].copy_(host[rows], non_blocking=True)
            arrival.signal(chunk)  # on the current stream: written when the copy is done
    y = ts.matmul(a, w, arrival=arrival, deadline=0.5)  # returns at once
    torch.cuda.synchronize()
    print("rows of chunk 1 are NaN:", bool(y[1024:2048].isnan().all()))
    try:
        ts.check()
    except ts.ArrivalTimeout as error:
        print(error)


if __name__ == "__main__":
    main()
