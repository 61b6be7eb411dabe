"""The firewall rules that a lab adds to its host. Each carries the lab's comment, by which it is found again."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass

__all__ = ["Rule", "lab_rules", "marked_rules"]


@dataclass(frozen=True)
class Rule:
    """One iptables rule: `spec` are the words after the chain."""

    table: str
    chain: str
    spec: tuple[str, ...]

    def command(self, action: str) -> list[str]:
        """The command for action -C (check), -I (put first) or -D (delete); waits for the xtables lock."""
        return ["iptables", "-w", "-t", self.table, action, self.chain, *self.spec]

    def __str__(self) -> str:
        return shlex.join(["-t", self.table, "-A", self.chain, *self.spec])


def lab_rules(bridge: str, subnet: str, comment: str) -> list[Rule]:
    """What lets the lab out: masquerade, forwarding in both directions, and segments that fit the uplink.

    The accept rules are put first, because a host with Docker or ufw drops what it does not know. The clamp is there
    because uplinks narrower than 1500 bytes are common (tunnels, clouds) and "fragmentation needed" often gets lost.
    """
    mark = ("-m", "comment", "--comment", comment)
    clamp = ("-p", "tcp", "-m", "tcp", "--tcp-flags", "SYN,RST", "SYN", *mark, "-j", "TCPMSS", "--clamp-mss-to-pmtu")
    return [
        Rule("nat", "POSTROUTING", ("-s", subnet, "!", "-o", bridge, *mark, "-j", "MASQUERADE")),
        Rule("filter", "FORWARD", ("-i", bridge, *mark, "-j", "ACCEPT")),
        Rule("filter", "FORWARD", ("-o", bridge, *mark, "-j", "ACCEPT")),
        Rule("mangle", "FORWARD", ("-i", bridge, *clamp)),
        Rule("mangle", "FORWARD", ("-o", bridge, *clamp)),
    ]


def marked_rules(iptables_save: str, comment: str) -> list[Rule]:
    """All rules with exactly this comment in the output of `iptables-save`, in whatever shape they were written."""
    table, found = "", []
    for line in iptables_save.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith("-A "):
            words = shlex.split(line)
            if any(pair == ("--comment", comment) for pair in itertools.pairwise(words)):
                found.append(Rule(table, words[1], tuple(words[2:])))
    return found
