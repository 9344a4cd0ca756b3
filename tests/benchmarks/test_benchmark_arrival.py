"""The page on inputs that arrive: what a record says is what the page says."""

from __future__ import annotations

from benchmarks.report import arrival

ABOUT = {
    "device": "a GPU", "torch": "2.11", "triton": "3.6.0", "commit": "abc", "date": "2026-01-01", "failures": [],
    "dtype": "bfloat16",
}  # fmt: skip
WHERE = "(a GPU, torch 2.11, Triton 3.6.0, commit `abc`, 2026-01-01)"


def cells(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_memory_order():
    row = {"section": "order", "producer": "worker", "way": "relaxed", "rounds": 100000, "wrong_rounds": 1234,
           "wrong_elements": 56789, "seconds": 1.0}  # fmt: skip
    text = "\n".join(arrival.order({**ABOUT, "rows": [row]}))
    assert cells(text, "worker") == ["worker", "relaxed", "100,000", "1,234", "56,789"]
    assert "Not finished" not in text
    cut = arrival.order({**ABOUT, "failures": ["worker, relaxed: 7 of 9"], "rows": [row]})
    assert cut[-1] == "Not finished: worker, relaxed: 7 of 9."


def test_polling():
    rows = [
        {"section": "polling", "pause_ns": pause, "watts": watts, "looks_per_us_and_poller": looks, "ms": ms,
         "matmul": "8x8x8", "pollers_beside": 0 if pause is None else 16}
        for pause, watts, looks, ms in (
            (None, 100.0, None, 2.0), (64, 151.0, 1.25, 2.5), (1_000_000, None, 0.001, 2.25),
        )
    ]  # fmt: skip
    text = "\n".join(arrival.polling({**ABOUT, "rows": rows}))
    assert "16 workers wait beside the matmul (8x8x8)" in text
    assert cells(text, "64") == ["64", "1.250", "151", "2.500", "0.900"]
    assert cells(text, "no worker waits") == ["no worker waits", "-", "100", "2.000", "1.125"]
    assert cells(text, "as good as asleep")[1:] == ["0.001", "not readable", "2.250", "1.000"]
    cut_off = "\n".join(arrival.polling({**ABOUT, "rows": rows[:1]}))
    assert cells(cut_off, "no worker waits")[-1] == "-"


def test_copies_beside_a_matmul(results, write):
    ways = {"copy": 5.0, "multiply": 4.0, "torch.mm": 3.5, "in turn": 8.5, "by chunks": 5.5, "streamed": 5.25}
    row = {"shape": "16384x8192x8192", "ms": ways, "of_larger": 1.05, "of_in_turn": 5.25 / 8.5, "copy_gb_per_s": 53.7}
    write("h100", "stream", {**ABOUT, "rows": [row, {**row, "copy_gb_per_s": 55.2}]})
    write("cpu", "stream", {**ABOUT, "rows": [{"shape": [1, 2, 3]}]})
    text = "\n".join(arrival.page(results))
    assert f"at 54 to 55 GB/s {WHERE}" in text
    assert "| 16384x8192x8192 | 5.00 | 4.00 | 3.50 | 8.50 | 5.50 | 5.25 | 1.050 | 1.619 | 1.048 |" in text
    assert "by the matmul itself" not in text
    ways |= {"by the kernel": 5.75, "by the kernel, 4 copiers": 7.5}
    row |= {
        "plan": "hopper cooperative", "copies": "rows by the kernel: the first 8 of 132 workers copy",
        "of_larger_by_the_kernel": 1.15,
    }  # fmt: skip
    write("h200", "stream_copies", {**ABOUT, "rows": [row]})
    text = "\n".join(arrival.page(results))
    assert "| 16384x8192x8192 | hopper | 8 | 5.00 | 4.00 | 5.25 | 5.75 | 7.50 | 1.050 | 1.150 |" in text


def test_records_are_found(results, write):
    assert arrival.page(results) == [arrival.NOTES("page")]
    write("h100", "arrival", {**ABOUT, "rows": []})
    assert arrival.page(results) == [arrival.NOTES("page")]
