"""The matrix of `nvidia-smi topo -m`, with what makes it hard to read."""

from __future__ import annotations

import json
from pathlib import Path

from servelab.shared.topology import parse_topology

CASE = Path(__file__).parent / "cases/04-topo-m-ansi"

# Two NICs, NVLink across the sockets, and the empty cell that newer releases print before "GPU NUMA ID".
WITH_NICS = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tNV12\tNV12\tPIX\tSYS\t0-15\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tNV12\tNV12\tPIX\tSYS\t0-15\t0\t\tN/A\n"
    "GPU2\tNV12\tNV12\t X \tNV12\tSYS\tPIX\t16-31\t1\t\tN/A\n"
    "GPU3\tNV12\tNV12\tNV12\t X \tSYS\tPIX\t16-31\t1\t\tN/A\n"
    "NIC0\tPIX\tPIX\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPIX\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


def test_the_case_of_two_islands_without_nvlink() -> None:
    expected = json.loads((CASE / "expected.json").read_text())
    topology = parse_topology((CASE / "topo.txt").read_text())
    assert len(topology.gpus) == expected["gpus"]
    assert {f"{a}-{b}": link for (a, b), link in topology.links.items()} == expected["links"]
    assert topology.nvlink is expected["nvlink"]
    assert {str(gpu): numa for gpu, numa in topology.numa.items()} == expected["numa"]
    assert {gpu: topology.cpus[int(gpu)] for gpu in expected["cpus"]} == expected["cpus"]
    assert topology.islands == [[0, 1], [2, 3]]  # GPU 3 has no NUMA node, but its link to GPU 2 stays within one
    assert topology.crossing(4) == "TP=4 crosses NUMA (SYS)"
    assert topology.crossing(2) is None


def test_nics_and_empty_cells_are_not_gpus() -> None:
    topology = parse_topology(WITH_NICS)
    assert topology.gpus == [0, 1, 2, 3]
    assert topology.nvlink
    assert topology.numa == {0: 0, 1: 0, 2: 1, 3: 1}
    assert topology.islands == [[0, 1], [2, 3]]
    assert topology.crossing(4) is None  # NVLink carries it
    assert topology.describe() == "4 GPUs, NVLink, 2 NUMA islands (0-1; 2-3)"


def test_one_socket_is_one_island() -> None:
    topology = parse_topology(
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-7\tN/A\nGPU1\tPHB\t X \t0-7\tN/A\n"
    )
    assert topology.describe() == "2 GPUs, no NVLink, 1 NUMA island (0-1)"


def test_a_sentence_is_not_a_matrix() -> None:
    assert parse_topology("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.").gpus == []
