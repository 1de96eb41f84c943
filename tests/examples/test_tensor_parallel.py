import re

from tests.examples.conftest import Starter


def test_a_gpt_on_a_mesh_of_2_x_2_ranks_trains_as_in_one_process(start: Starter) -> None:
    printed = start.run(
        "paceline run -n 4", "tensor_parallel.py", "--steps", 25, "--width", 32, "--context", 16
    )

    assert re.search(r"mesh +2 \(data\) x 2 \(tensor\) ranks", printed), printed
    first, last = map(float, re.findall(r"first to last +([\d.]+) to ([\d.]+)", printed)[0])
    assert last < first - 0.5
    assert float(re.findall(r"largest difference (\S+)", printed)[0]) < 1e-5
    assert (start.folder / "checkpoints/tensor_parallel/.metadata").exists()
