"""FLOP formulas given to torch's counter, whenever that is imported."""

import importlib
import sys
import threading

from tilestream.ops import flops

COUNTER = """
import threading
going_on = threading.Event()
going_on.wait(300)
known = {}
def register_flop_formula(ops):
    return lambda formula: known.setdefault(ops, formula)
"""


def test_an_import_of_the_counter_in_another_thread_is_waited_for(tmp_path, monkeypatch):
    (tmp_path / "counter_of_a_test.py").write_text(COUNTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flops, "_COUNTER", "counter_of_a_test")
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, flops._Finder)])
    importing = threading.Thread(target=importlib.import_module, args=("counter_of_a_test",))
    importing.start()
    while not hasattr(sys.modules.get("counter_of_a_test"), "going_on"):
        importing.join(0.001)
    module = sys.modules["counter_of_a_test"]
    threading.Timer(0.1, module.going_on.set).start()
    flops.register_flop_formula("op")(abs)
    importing.join()
    del sys.modules["counter_of_a_test"]
    assert module.known == {"op": abs}
