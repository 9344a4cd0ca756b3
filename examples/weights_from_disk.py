"""A layer whose weight is still being read from a file: its rows arrive, and the output's columns with them.

python examples/weights_from_disk.py [rows of the weight]
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import tilestream as ts


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    torch.manual_seed(0)
    x, bias = torch.randn(512, 1024), torch.randn(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer.safetensors"
        save_file({"up_proj.weight": torch.randn(rows, 1024)}, path)
        with ts.trace.record() as recorder, ts.stream_in(path, tensor="up_proj.weight") as weight:
            y = ts.linear(x, weight.tensor, bias, activation="gelu", weight_arrival=weight.arrival)
            print(weight.explain())
        expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight.tensor, bias))
        launch = recorder.launches[0]
        waited = f"{1e3 * launch.waited:.1f} ms spent waiting for chunks"
        print(f"{launch.tiles_done} tiles on {launch.workers} workers, {waited}")
        print("largest difference from torch:", (y - expected).abs().max().item())


if __name__ == "__main__":
    main()
