"""The servers' comparison with a stand-in for a server: what is asked, compared, recorded, and what is a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.run import main
from benchmarks.serving import servers

#: Answers depend on the prompt. ``off`` moves the log-probability, ``near`` little; ``ends`` is a server that dies.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

model, port, way = sys.argv[1], int(sys.argv[2]), (sys.argv + [""])[3]
if way == "ends":
    sys.exit("no such backend")
print("tilestream's plugin: " + way, flush=True)

class Handler(BaseHTTPRequestHandler):
    def answer(self, found):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["model"], asked["temperature"]) == (model, 0), asked
        count, seed = asked["max_tokens"], sum(asked["prompt"])
        logprobs = [-1.0 - (way == "off") - 0.01 * (way == "near")] * count
        tokens = [str(seed + i + (way == "near" and i == 3)) for i in range(count)]
        self.answer({"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": logprobs}}]})

    def log_message(self, *_):
        pass

ThreadingHTTPServer.request_queue_size = 64
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM is a stand-in with these ways."""
    file = tmp_path / "server.py"
    file.write_text(SERVER)

    def made(*ways: str) -> None:
        command = (sys.executable, str(file), "{model}", "{port}")
        monkeypatch.setitem(servers.ENGINES, "vllm", servers.Engine(command, {way: (way,) for way in ways}))

    return made


def test_a_way_that_answers_alike_is_timed(engine, results: Path, capsys: pytest.CaptureFixture) -> None:
    engine("own", "near")
    assert main(["serving", "vllm", "a-model", str(results), "--lengths", "3,7"]) == 0
    (path,) = results.glob("*/serving_vllm.json")
    found = json.loads(path.read_text())
    own, near = found["rows"]
    assert found["failures"] == []
    assert (own["name"], own["first_logprob_difference"], own["equal_tokens"]) == ("own", 0, 1)
    assert near["first_logprob_difference"] == pytest.approx(0.01)
    assert near["equal_tokens"] == pytest.approx(1 - 1 / servers.TOKENS, abs=1e-3)
    assert set(near["first_token_ms"]) == {"3", "7"}
    assert near["tokens_per_second"] > 0
    assert near["said"] == ["tilestream's plugin: near"]
    assert near["command"][2:] == ["a-model", near["command"][3], "near"]


def test_other_answers_and_a_server_that_ends_are_failures(engine, results: Path) -> None:
    engine("own", "off", "ends")
    assert main(["serving", "vllm", "a-model", str(results), "--lengths", "3"]) == 1
    (path,) = results.glob("*/serving_vllm.json")
    off, ends = json.loads(path.read_text())["failures"]
    assert off == "off: the first token's log-probability differs by 1"
    assert ends.startswith("ends: RuntimeError: ")
    assert "no such backend" in (path.parent / "serving_vllm_ends.log").read_text()


def test_a_server_that_does_not_come_is_stopped(tmp_path: Path) -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with pytest.raises(RuntimeError, match="is not healthy after 1 s"):  # noqa: SIM117
        with servers.serving(sleeps, servers.free_port(), tmp_path / "log", seconds=1.0):
            pass


def test_the_ways_are_those_of_the_documentation() -> None:
    """Each option of a way stands in its how-to."""
    docs = Path(__file__).parents[2] / "docs" / "howto"
    for name, engine in servers.ENGINES.items():
        text = (docs / f"{name}.md").read_text(encoding="utf-8")
        for way, added in engine.ways.items():
            assert way == "own" or all(word in text for word in added), (name, way)
