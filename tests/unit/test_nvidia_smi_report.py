"""`nvidia-smi -q` and `topo -p2p`, written by hand in the layout of the tool."""

from __future__ import annotations

import pytest

from servelab.shared.nvidia_smi_report import GpuDetail, parse_peers, parse_report

# A newer driver has more under the same names (Device Current, Host Max); "Total" and "Max" come many times.
REPORT = """
==============NVSMI LOG==============

Timestamp                                              : Sun Nov 29 18:00:00 2026
Driver Version                                         : 580.95.05
CUDA Version                                           : 13.0

Attached GPUs                                          : 2
GPU 00000000:01:00.0
    Product Name                                       : NVIDIA RTX PRO 6000 Blackwell Server Edition
    Persistence Mode                                   : Disabled
    MIG Mode
        Current                                        : Disabled
        Pending                                        : Disabled
    PCI
        Bus                                            : 0x01
        GPU Link Info
            PCIe Generation
                Max                                    : 5
                Current                                : 4
                Device Current                         : 4
                Device Max                             : 5
                Host Max                               : 4
            Link Width
                Max                                    : 16x
                Current                                : 8x
        Bridge Chip
            Type                                       : N/A
    Performance State                                  : P0
    FB Memory Usage
        Total                                          : 97887 MiB
        Reserved                                       : 637 MiB
    BAR1 Memory Usage
        Total                                          : 256 MiB
        Used                                           : 1 MiB
    Conf Compute Protected Memory Usage
        Total                                          : 0 MiB
    Processes                                          : None

GPU 00000000:21:00.0
    Persistence Mode                                   : N/A
    PCI
        GPU Link Info
            PCIe Generation
                Max                                    : N/A
                Current                                : N/A
    FB Memory Usage
        Total                                          : [N/A]
    BAR1 Memory Usage
        Total                                          : N/A
"""
PEERS = """ \t\x1b[4mGPU0\tGPU1\tGPU2\t\x1b[0m
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tNS\t
 GPU2\tCNS\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def test_values_belong_to_their_section_and_their_card():
    one, two = parse_report(REPORT)
    assert one == GpuDetail("00000000:01:00.0", False, 256, 97887, 4, 5, 8, 16, "P0")
    assert two == GpuDetail("00000000:21:00.0")


@pytest.mark.parametrize("text", ["", "No devices were found\n", "Failed to initialize NVML: Unknown Error\n"])
def test_a_sentence_is_no_card(text):
    assert parse_report(text) == []
    assert parse_peers(text) == {}


def test_peers_are_ordered_pairs_without_the_legend():
    assert parse_peers(PEERS) == {
        (0, 1): "OK",
        (0, 2): "CNS",
        (1, 0): "OK",
        (1, 2): "NS",
        (2, 0): "CNS",
        (2, 1): "OK",
    }
