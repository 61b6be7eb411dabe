"""Prints what this machine asked of the network since it started, from the kernel's own counters."""

from pathlib import Path

lines = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines()]
counters = {
    names[0] + name: value
    for names, values in zip(lines[::2], lines[1::2], strict=True)
    for name, value in zip(names[1:], values[1:], strict=True)
}
counters |= dict(line.split() for line in Path("/proc/net/snmp6").read_text().splitlines())
print(
    {
        name: int(counters[name])
        for name in ("Tcp:ActiveOpens", "Udp:OutDatagrams", "Udp6OutDatagrams", "Ip:OutNoRoutes")
    }
)
