"""Start a server in each way, one after the other; send all the same prompts; compare the answers and the times.

    python benchmarks/run.py serving vllm MODEL    # where the engine and this library are installed, with a GPU

Prompts are token numbers, so answers do not depend on a tokenizer. They are decoded greedily. Tokens may differ where
two are nearly as likely, so the log-probability of each prompt's first token is compared. The record also has the
fraction of equal tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.core.paths import RESULTS
from benchmarks.core.records import Record, Row

LENGTHS, TOGETHER, TOKENS, REPEATS = (128, 1024, 4096, 8000), 32, 16, 5
#: Tokens that every vocabulary has.
LEAST, MOST = 1000, 20000
#: Of the first token's log-probability: 16 bits through all layers of a model.
MOST_DIFFERENCE = 0.25
SECONDS_TO_START = 900.0


class Engine(NamedTuple):
    """How a server is started: what all ways share, what each adds; the first is the engine's own."""

    command: tuple[str, ...]
    ways: dict[str, tuple[str, ...]]


ENGINES = {
    "vllm": Engine(
        ("vllm", "serve", "{model}", "--port", "{port}", "--no-enable-prefix-caching"),
        {
            "own": (),
            "attention": ("--attention-backend", "CUSTOM"),
            "attention, linear": ("--attention-backend", "CUSTOM", "--quantization", "tilestream"),
        },
    ),
    "sglang": Engine(
        (
            sys.executable, "-m", "sglang.launch_server", "--model-path", "{model}", "--port", "{port}", "--page-size",
            "64", "--disable-radix-cache",
        ),
        {
            "own": ("--attention-backend", "triton"),
            "attention": ("--prefill-attention-backend", "tilestream", "--decode-attention-backend", "triton"),
        },
    ),
}  # fmt: skip


class Answer(NamedTuple):
    """What a server made of a prompt."""

    tokens: list[str]
    logprobs: list[float]
    seconds: float


# The server -----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
    return port


@contextmanager
def serving(command: list[str], port: int, log: Path, seconds: float = SECONDS_TO_START) -> Iterator[str]:
    """The address of a server, once it is healthy; it is stopped at the block's end.

    Raises
    ------
    RuntimeError
        If it ends, or is not healthy in time; with the end of its log.
    """
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + seconds
    with log.open("w", encoding="utf-8") as file, subprocess.Popen(
        command, stdout=file, stderr=subprocess.STDOUT
    ) as server:  # fmt: skip
        try:
            while not is_healthy(address):
                if server.poll() is not None or time.monotonic() > end:
                    why = "ended" if server.poll() is not None else f"is not healthy after {seconds:.0f} s"
                    raise RuntimeError(f"{' '.join(command)} {why}: {log.read_text(encoding='utf-8')[-1500:]}")
                time.sleep(0.5)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(address: str, model: str, prompt: list[int], tokens: int) -> Answer:
    """Complete a prompt greedily."""
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        found = json.load(answer)["choices"][0]["logprobs"]
    return Answer(found["tokens"], found["token_logprobs"], time.perf_counter() - begin)


# What is measured -----------------------------------------------------------------------------------------------------


def prompts(count: int, length: int) -> list[list[int]]:
    draw = random.Random(length)
    return [[draw.randrange(LEAST, MOST) for _ in range(length)] for _ in range(count)]


def measure(address: str, model: str, lengths: tuple[int, ...]) -> tuple[Row, dict[int, Answer]]:
    """Milliseconds to the first token of one prompt, tokens a second of many at once, and an answer a length."""
    answers = {length: ask(address, model, prompts(1, length)[0], TOKENS) for length in lengths}
    first = {
        length: [ask(address, model, prompt, 1).seconds for prompt in prompts(REPEATS, length)] for length in lengths
    }
    many = [prompt for length in lengths for prompt in prompts(TOGETHER // len(lengths), length)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(many)) as pool:
        list(pool.map(lambda prompt: ask(address, model, prompt, TOKENS), many))
    seconds = time.perf_counter() - begin
    row = {
        "first_token_ms": {str(length): round(statistics.median(times) * 1e3, 2) for length, times in first.items()},
        "tokens_per_second": round((sum(map(len, many)) + TOKENS * len(many)) / seconds, 1),
    }
    return row, answers


def compare(answers: dict[int, Answer], own: dict[int, Answer]) -> Row:
    """How far answers are from the engine's own."""
    pairs = [(answers[length], own[length]) for length in own]
    equal = [a == b for ours, theirs in pairs for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
    return {
        "first_logprob_difference": max(abs(ours.logprobs[0] - theirs.logprobs[0]) for ours, theirs in pairs),
        "equal_tokens": round(sum(equal) / len(equal), 3),
    }


def run(engine: str, arguments: list[str]) -> int:
    """Each way of an engine; 1 if a server does not start or answers otherwise than the engine's own."""
    parser = argparse.ArgumentParser(prog=f"run.py serving {engine}", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("model", help="the path or the name of a model")
    parser.add_argument("out", nargs="?", type=Path, default=RESULTS, help="folder of the record")
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))), default=LENGTHS,
                        help="tokens of the prompts (default: %(default)s)")  # fmt: skip
    asked, more = parser.parse_known_args(arguments)  # more: passed on to each server
    record = Record(f"serving_{engine}", asked.out, model=asked.model, lengths=asked.lengths, arguments=more)
    own: dict[int, Answer] = {}
    for way, added in ENGINES[engine].ways.items():
        port, log = free_port(), record.path.with_name(f"serving_{engine}_{way.replace(', ', '_')}.log")
        words = [word.format(model=asked.model, port=port) for word in (*ENGINES[engine].command, *added)] + more
        try:
            with serving(words, port, log) as address:
                row, answers = measure(address, asked.model, asked.lengths)
        except (RuntimeError, OSError, KeyError, urllib.error.URLError) as error:
            record.fail(f"{way}: {type(error).__name__}: {error}"[:300])
            record.write()
            continue
        own = own or answers
        row |= {"name": way, "command": words, **compare(answers, own)}
        row["said"] = [
            line.strip()[:200] for line in log.read_text(encoding="utf-8").splitlines() if "tilestream" in line
        ]
        if row["first_logprob_difference"] > MOST_DIFFERENCE:
            record.fail(f"{way}: the first token's log-probability differs by {row['first_logprob_difference']:.3g}")
        record.add(row)
        print(way, {key: value for key, value in row.items() if key not in ("command", "name", "said")}, flush=True)
    print(record.path, *record.data["failures"], sep="\n")
    return int(bool(record.data["failures"]))


def vllm(arguments: list[str]) -> int:
    return run("vllm", arguments)


def sglang(arguments: list[str]) -> int:
    return run("sglang", arguments)
