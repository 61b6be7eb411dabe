"""Which `pct set` makes a container's configuration what is wanted, and no more.

Proxmox stores some options verbatim (dev, features), rewrites others (net, mp), fills in what was left out (a
MAC address at every set without one; another disk at every `storage:size`) and rewrites the file even where nothing
changes. So options are compared by meaning, and only what differs is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .pve_conf import GuestConf, RawLine, edit_raw

__all__ = [
    "GPU_NODE",
    "Device",
    "Plan",
    "Wanted",
    "canonical",
    "create_argv",
    "explain",
    "gpu_devices",
    "plan",
    "render",
    "set_argv",
]

# The property that may stand without its name at the start of a property string.
_BARE_PROPERTY = {"dev": "path", "mp": "volume", "rootfs": "volume", "startup": "order"}
_FLAGS_OFF_BY_DEFAULT = {"onboot", "protection", "template", "debug", "unprivileged"}
_NUMBERS = {"cores", "memory", "swap", "cpuunits", "tty", "cpulimit"}
_LISTS = {"nameserver", "searchdomain", "tags"}
_TRUE = {"1", "on", "yes", "true"}
_FALSE = {"0", "off", "no", "false"}
# What the absence of a property means: naming it with this value says nothing new.
_PROPERTY_DEFAULTS: dict[str, dict[str, str]] = {
    "dev": {"mode": "0660", "uid": "0", "gid": "0", "deny-write": "0"},
    "net": {"type": "veth", "firewall": "0", "link_down": "0"},
    "mp": {"ro": "0", "backup": "0", "quota": "0", "shared": "0", "replicate": "1"},
    "rootfs": {"ro": "0", "quota": "0", "shared": "0", "replicate": "1"},
}
_BOOLEAN_PROPERTIES = {"deny-write", "firewall", "link_down", "ro", "backup", "quota", "shared", "replicate", "acl"}
_WRITE_ONLY = {
    "env": "give lxc.environment.runtime as a raw line",
    "lock": "locks belong to Proxmox's jobs",
    "description": "it is kept as comments, which are left to people",
}
_FIXED_AT_CREATION = ("unprivileged", "arch")

GPU_NODE = re.compile(r"^/dev/nvidia(\d+|ctl|-uvm|-uvm-tools)$")
_CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
# A value that allocates a new volume each time it is set: "local-zfs:8".
_ALLOCATION = re.compile(r"^(?P<storage>[^/:]+):(?P<size>\d+(\.\d+)?)$")

Device = dict[str, str]
"""The properties of one dev[n]: path, and optionally mode, uid, gid, deny-write."""


@dataclass(frozen=True)
class Wanted:
    """What a guest's configuration shall say; what is not named is left alone.

    options: option → scalar, list or mapping of properties, in Proxmox's names (net0, features, memory);
    mounts: [{"source", "path", "read_only"}], found again by their path in the guest;
    devices: the whole list of NVIDIA devices, or None to leave them alone;
    delete: options that shall be absent; raw: lxc.* lines of the running section.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    mounts: Sequence[Mapping[str, Any]] = ()
    devices: Sequence[Device] | None = None
    delete: Sequence[str] = ()
    raw: Sequence[RawLine] = ()


@dataclass
class Plan:
    """What one `pct set` has to do. `errors` are sentences: with any of them nothing may be changed."""

    sets: dict[str, str] = field(default_factory=dict)
    deletes: list[str] = field(default_factory=list)
    revert: list[str] = field(default_factory=list)
    raw: list[RawLine] = field(default_factory=list)
    managed: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        return bool(self.sets or self.deletes or self.revert or self.raw)


def properties(option: str, value: str) -> dict[str, str]:
    """Split a property string ("/dev/nvidia0,mode=0666") into its properties, the bare first one under its name."""
    kind = _kind(option)
    found: dict[str, str] = {}
    for part in value.split(","):
        key, equals, content = part.strip().partition("=")
        if equals:
            found[key] = content
        elif key:
            found[_BARE_PROPERTY.get(kind, key)] = key
    return found


def canonical(option: str, value: str) -> Any:
    """The meaning of an option's stored text, so that two texts that mean the same are equal."""
    kind = _kind(option)
    if kind in _PROPERTY_DEFAULTS:
        return _canonical_properties(kind, properties(option, value))
    if option == "features":
        return _canonical_features(value)
    if option == "startup":
        return {key: str(int(content)) for key, content in properties(option, value).items() if content.isdigit()}
    if option in _FLAGS_OFF_BY_DEFAULT or option == "console":
        return _boolean(value)
    if option in _NUMBERS:
        number = _number(value)
        return 2.0 if option == "cpuunits" and number == 0 else number  # stored as the smallest that cgroup2 takes
    if option in _LISTS:
        words = [word for word in re.split(r"[,;\s]+", value.strip()) if word]
        return sorted({word.lower() for word in words}) if option == "tags" else words
    return value


def render(option: str, value: Any) -> str:
    """The text to hand to `pct set` for a wanted value (scalar, list or mapping of properties).

    Raises ValueError, a sentence, for a value that a property string cannot carry.
    """
    if isinstance(value, Mapping):
        bare = _BARE_PROPERTY.get(_kind(option))
        parts = [str(value[bare])] if bare and bare in value else []
        parts += [f"{key}={_scalar(content)}" for key, content in value.items() if key != bare and content is not None]
        for part in parts:
            if "," in part or "\n" in part:
                raise ValueError(
                    f"{option}: {part!r} holds a comma or a line break, which Proxmox's property strings cannot "
                    "carry; choose a value without one."
                )
        return ",".join(parts)
    if isinstance(value, list | tuple):
        return (" " if option in ("nameserver", "searchdomain") else ";").join(str(item) for item in value)
    return _scalar(value)


def gpu_devices(
    present: Iterable[str], gpus: str | Sequence[int], properties_: Mapping[str, str]
) -> tuple[list[Device], list[str]]:
    """The dev[n] entries that give the chosen GPUs to a guest, and what stands against it.

    present: paths under /dev that are character devices on the node now; gpus: "all" or card numbers;
    properties_: what each entry gets besides its path, e.g. {"mode": "0666"}.
    """
    there = set(present)
    cards = sorted(int(match[1]) for path in there if (match := re.match(r"^/dev/nvidia(\d+)$", path)))
    if isinstance(gpus, str):
        if gpus != "all":
            return [], [f"gpus is {gpus!r}; it must be 'all' or a list of card numbers such as [0, 2]."]
        if not cards:
            return [], [
                "gpus is 'all', but the node has no /dev/nvidia0 that is a character device; load the NVIDIA driver "
                "on the node (nvidia-modprobe -c=0 -u) or set gpus: [] for a guest without GPUs."
            ]
        chosen = cards
    else:
        chosen = list(gpus)
    if not chosen:
        return [], []
    paths = [*(f"/dev/nvidia{card}" for card in chosen), *_CONTROL_NODES]
    errors = [
        f"{path} is not a character device on the node, which has "
        f"{('cards ' + ', '.join(map(str, cards))) if cards else 'no cards'}; "
        + (
            "correct gpus in the inventory, or look with `nvidia-smi` on the node for a card that fell off the bus."
            if path not in _CONTROL_NODES
            else "run `nvidia-modprobe -c=0 -u` on the node, and have a unit do so before pve-guests.service."
        )
        for path in paths
        if path not in there
    ]
    return [{"path": path, **properties_} for path in paths], errors


def plan(conf: GuestConf, wanted: Wanted, text: str = "") -> Plan:
    """Compare a guest's configuration with what is wanted. `text` is the file itself, for its lxc.* lines."""
    result = Plan()
    planned = conf.planned
    targets = dict(wanted.options)
    _place_mounts(planned, wanted.mounts, targets)
    unwanted = list(wanted.delete)
    if wanted.devices is not None:
        # Also those whose removal already waits for a restart: they are still in force.
        result.managed |= {o for o, v in conf.current.items() if _kind(o) == "dev" and GPU_NODE.match(_device_path(v))}
        unwanted += _place_devices(planned, wanted.devices, targets)

    for option, value in targets.items():
        result.managed.add(option)
        try:
            _plan_option(option, value, planned, conf, result)
        except ValueError as error:
            result.errors.append(str(error))
    for option in unwanted:
        result.managed.add(option)
        if option in targets:
            result.errors.append(f"{option} is both wanted and to be deleted; remove one of the two.")
        else:
            _plan_removal(option, conf, result)
    if wanted.raw and edit_raw(text, wanted.raw) != text:
        result.raw = list(wanted.raw)
    return result


def set_argv(vmid: int, change: Plan, digest: str | None = None) -> list[str]:
    """The one `pct set` for a plan. The digest makes Proxmox refuse when someone else edited meanwhile."""
    argv = ["set", str(vmid)]
    for option, value in change.sets.items():
        argv += [f"--{option}", value]
    if change.deletes:
        argv += ["--delete", ",".join(change.deletes)]
    return [*argv, "--digest", digest] if digest else argv


def create_argv(vmid: int, template: str, wanted: Wanted) -> list[str]:
    """The `pct create` that brings a guest into being as wanted.

    Raises ValueError with a sentence for values that cannot be written.
    """
    initial = plan(GuestConf(), wanted)
    if initial.errors:
        raise ValueError(" ".join(initial.errors))
    argv = ["create", str(vmid), template]
    for option, value in initial.sets.items():
        argv += [f"--{option}", value]
    return argv


def _plan_option(option: str, value: Any, planned: Mapping[str, str], conf: GuestConf, result: Plan) -> None:
    if option in _WRITE_ONLY:
        raise ValueError(f"{option} is not kept as an option; {_WRITE_ONLY[option]}.")
    text = render(option, value)
    present = planned.get(option)
    meaning = canonical(option, text)
    if option in _FIXED_AT_CREATION and conf.current:
        if canonical(option, present or "0") != meaning:
            result.errors.append(
                f"{option} is {present or 0} on this guest and {text} is wanted, but Proxmox fixes it at creation; "
                f"set {option} to what the guest has, or make it anew (vzdump, then `pct restore --{option} {text}`)."
            )
        return
    if option == "rootfs" and present is not None:
        _notice_rootfs(text, present, result)
        return
    if present is None:
        # An absent flag is off and an absent feature list is empty: asking for that changes nothing.
        if (option in _FLAGS_OFF_BY_DEFAULT and conf.current and not meaning) or (option == "features" and not meaning):
            return
        result.sets[option] = text
        return
    if option == "features" and not meaning:
        if canonical(option, present):
            # An empty --features would leave "features: " behind.
            _plan_removal(option, conf, result)
        return
    kind = _kind(option)
    if kind == "net":
        text, meaning = _keep_mac(text, present)
    elif kind == "mp":
        text, meaning = _keep_volume(option, text, present, result)
    comparable = canonical(option, present)
    if kind == "mp":
        # Proxmox records the volume's real size whatever it is told, so a size never counts as a difference.
        comparable.pop("size", None)
        meaning.pop("size", None)
    if comparable != meaning:
        result.sets[option] = text


def _plan_removal(option: str, conf: GuestConf, result: Plan) -> None:
    if option not in conf.planned:
        return
    if option in conf.pending:
        # Deleting a key that also has a pending value leaves both, and the value wins at the restart.
        result.revert.append(option)
    if option in conf.current:
        result.deletes.append(option)


def _place_mounts(planned: Mapping[str, str], mounts: Sequence[Mapping[str, Any]], targets: dict[str, Any]) -> None:
    """Give each wanted mount the mp[n] that already serves its path, else a free one (its own position if free)."""
    taken = {option for option in planned if _kind(option) == "mp"} | {o for o in targets if _kind(o) == "mp"}
    by_path = {properties(option, planned[option]).get("mp"): option for option in taken if option in planned}
    for position, mount in enumerate(mounts):
        option = by_path.get(str(mount["path"]))
        if option is None:
            option = next(f"mp{n}" for n in (position, *range(256)) if f"mp{n}" not in taken)
        taken.add(option)
        value: dict[str, Any] = {"volume": mount["source"], "mp": mount["path"]}
        if mount.get("read_only"):
            value["ro"] = 1
        targets[option] = value


def _place_devices(planned: Mapping[str, str], devices: Sequence[Device], targets: dict[str, Any]) -> list[str]:
    """Give each wanted device the dev[n] that has its path, else a free one. Returns the entries that must go."""
    entries = sorted((o for o in planned if _kind(o) == "dev"), key=lambda option: int(option[3:]))
    by_path: dict[str, str] = {}
    surplus: list[str] = []
    wanted_paths = {device["path"] for device in devices}
    for option in entries:
        path = _device_path(planned[option])
        if path in by_path and path in wanted_paths:
            surplus.append(option)  # the same path twice lets the guest's start fail
        elif path in wanted_paths:
            by_path[path] = option
        elif GPU_NODE.match(path):
            surplus.append(option)
    taken = set(entries) | set(targets)
    for device in devices:
        option = by_path.get(device["path"]) or next(f"dev{n}" for n in range(256) if f"dev{n}" not in taken)
        taken.add(option)
        targets[option] = dict(device)
    return surplus


def _keep_mac(text: str, present: str) -> tuple[str, Any]:
    """A net[n] set without its MAC address gets a new one; so the present one is always repeated."""
    wanted, existing = properties("net", text), properties("net", present)
    if "hwaddr" not in wanted and "hwaddr" in existing:
        wanted["hwaddr"] = existing["hwaddr"]
    text = ",".join(f"{key}={value}" for key, value in wanted.items())
    return text, canonical("net", text)


def _keep_volume(option: str, text: str, present: str, result: Plan) -> tuple[str, Any]:
    """A mount point set to `storage:size` gets another disk each time; so the present volume is kept."""
    wanted, existing = properties("mp", text), properties("mp", present)
    volume = existing.get("volume", "")
    if allocation := _ALLOCATION.match(wanted.get("volume", "")):
        if volume.startswith(allocation["storage"] + ":"):
            wanted["volume"] = volume
            if "size" in existing:
                wanted["size"] = existing["size"]
        else:
            raise ValueError(
                f"{option} is {volume} and a new volume on {allocation['storage']} is wanted at {wanted.get('mp')}; "
                f"move it (`pct move-volume`) or take the mount out of the guest first."
            )
    return render("mp", wanted), canonical("mp", render("mp", wanted))


def _notice_rootfs(text: str, present: str, result: Plan) -> None:
    wanted, existing = properties("rootfs", text), properties("rootfs", present)
    allocation = _ALLOCATION.match(wanted.get("volume", ""))
    volume = existing.get("volume", "")
    if allocation is None:
        same = wanted.get("volume") == volume
    else:
        same = volume.startswith(allocation["storage"] + ":") and (
            "size" not in existing or _size_mib(existing["size"]) == float(allocation["size"]) * 1024
        )
    if not same:
        result.notices.append(
            f"rootfs is {present} and was asked for as {text}; it is used for creation only and is left as it is "
            "(`pct resize` or `pct move-volume` change it)."
        )


def _canonical_properties(kind: str, found: dict[str, str]) -> dict[str, Any]:
    meaning: dict[str, Any] = dict(_PROPERTY_DEFAULTS[kind])
    for key, content in found.items():
        if key in _BOOLEAN_PROPERTIES:
            meaning[key] = "1" if _boolean(content) else "0"
        elif key == "hwaddr":
            meaning[key] = content.upper()
        elif key in ("path", "volume", "mp"):
            meaning[key] = re.sub(r"/{2,}", "/", content)
        elif key == "size":
            meaning[key] = _size_mib(content)
        elif key in ("mountoptions", "trunks"):
            meaning[key] = sorted(content.split(";"))
        else:
            meaning[key] = content
    return meaning


def _canonical_features(value: str) -> dict[str, Any]:
    """Only the features that are on; `keyctl=0` is the same as no keyctl."""
    meaning: dict[str, Any] = {}
    for key, content in properties("features", value.strip()).items():
        if key == "mount":
            meaning[key] = sorted(word for word in content.split(";") if word)
        elif _boolean(content):
            meaning[key] = True
    return meaning


def _device_path(value: str) -> str:
    return re.sub(r"/{2,}", "/", properties("dev", value).get("path", ""))


def _size_mib(text: str) -> float | str:
    match = re.match(r"^(\d+(?:\.\d+)?)([KMGT]?)$", text)
    if match is None:
        return text
    return float(match[1]) * {"": 1 / 1048576, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1048576}[match[2]]


def _kind(option: str) -> str:
    return option.rstrip("0123456789")


def _boolean(text: str) -> bool | str:
    word = text.strip().lower()
    return True if word in _TRUE else False if word in _FALSE else text


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _scalar(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


# ---- what pct says when it refuses ----

_REMEDIES: list[tuple[str, str]] = [
    (
        r"Unknown option: dev\d+",
        "this Proxmox VE is older than 8.1 and cannot pass devices by dev[n]; upgrade it, or set gpu_raw_lines: true",
    ),
    (
        r"Device (\S+) does not exist",
        "load the driver on the node (`nvidia-modprobe -c=0 -u`), or drop the entry if the card is gone",
    ),
    (
        r"Failed to set limit memlock",
        "the node may not raise this limit itself (no CAP_SYS_RESOURCE); give a memlock of at most the node's own",
    ),
    (r"CT is locked", "wait for the job that holds the lock; only if none runs any more, `pct unlock {vmid}`"),
    (r"got timeout", "another job is changing this guest; run again when it has ended"),
    (r"detected modified configuration", "someone else changed the guest meanwhile; run again"),
    (r"only allowed for root@pam", "connect to the node as root over ssh, not through an API token"),
    (r"storage '(\S+)' does not exist", "see `pvesm status` on the node for the storages that exist"),
    (r"bridge '(\S+)' does not exist", "see `ip -br link show type bridge` on the node for the bridges that exist"),
    (r"can't find file|volume '.*' does not exist", "fetch the template (`pveam update; pveam download`)"),
    (r"no quorum|cluster not ready", "the cluster has no quorum and /etc/pve is read-only; bring its nodes back"),
    (r"Read-only file system|Permission denied", "/etc/pve cannot be written; check `pvecm status` and pve-cluster"),
    (r"already exists on node", "choose another vmid, or adopt the guest by giving its own vmid"),
    (r"protection mode enabled", "`pct set {vmid} --protection 0` if that is really wanted"),
    (r"Configuration file '.*' does not exist", "there is no such guest on this node; check vmid and pve_node"),
]


def explain(stderr: str, vmid: int) -> str:
    """What pct printed when it refused, as one sentence with the remedy where one is known."""
    said: list[str] = []
    for line in (line.strip() for line in stderr.splitlines()):
        if not line or line.startswith(("400 ", "USAGE:")) or re.match(r"^pct \w+( <|\s*$)", line):
            continue
        # "dev1: invalid format - format error" only announces the line that says what is wrong.
        if line.endswith("invalid format - format error") or line == "trying to acquire lock...":
            continue
        # LXC's own lines carry time, file and function, and the first says why; what follows are the consequences.
        if message := re.match(r"^lxc-\w+:? .*? ERROR .*? - \S+ - (.+)$", line):
            if any(earlier.startswith("LXC: ") for earlier in said):
                continue
            line = f"LXC: {message[1]}"
        if line not in said:
            said.append(line.rstrip("."))
    if not said:
        said = [line.strip() for line in stderr.splitlines() if line.startswith("400 ")] or ["it gave no reason"]
    sentence = "; ".join(said)
    advice = next((text for pattern, text in _REMEDIES if re.search(pattern, sentence)), None)
    return f"{sentence}. Remedy: {advice.format(vmid=vmid)}." if advice else f"{sentence}."
