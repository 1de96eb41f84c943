import re

from tests.examples.conftest import Starter


def test_a_compiled_model_trains_in_one_graph(start: Starter) -> None:
    printed = start.run("paceline run", "compiled.py", "--backend", "aot_eager")

    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 3, printed
    assert losses[-1] < losses[0] / 4
    assert re.search(r"graphs: 1, buckets: [2-9]", printed), printed
