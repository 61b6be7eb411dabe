"""The failures that are known by name: how each looks in a log, what it means, and the one thing to do.

Order is priority: what causes stands before what it brings about (a rank that lost its peers reports NCCL, too). Every
pattern cites what it was written from, and `tests/unit/test_failure_catalogue.py` looks each citation up there.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cited:
    """A text that stands in `source`.

    `source` is "sglang" (its wheels from `since` to `until`, both included), another distribution whose wheel has it,
    or "stdlib"; "log" is a log of a real server, "kernel" a line of the node's kernel: both for what only comes in
    binaries.
    """

    text: str
    source: str = "sglang"
    since: str = "0.5.8"
    until: str | None = None


@dataclass(frozen=True)
class Entry:
    """One kind of failure. `cause` and `remedy` may use the pattern's groups and the keys of `advice`.

    `phases` limits it to ends within these phases of a start; empty is any. `kernel` entries are looked for in the
    node's kernel log instead of the server's.
    """

    name: str
    pattern: str
    cause: str
    remedy: str
    cited: tuple[Cited, ...]
    phases: frozenset[str] = field(default_factory=frozenset)
    kernel: bool = False


@dataclass(frozen=True)
class Notice:
    """Something a person should know about a server that goes on: it does not serve as it was asked to."""

    name: str
    pattern: str
    meaning: str
    cited: tuple[Cited, ...]


_OOM = r"(?:OutOfMemoryError: |RuntimeError: )(?P<what>CUDA out of memory\..*)"
_OOM_CITED = (Cited("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "log"),)
_CUDART = "nvidia-cuda-runtime"

CATALOGUE: tuple[Entry, ...] = (
    Entry(
        "GPU lost",
        # Not 13, 31, 43 and 45: those report what a program did.
        r"NVRM: Xid \((?P<where>[^)]*)\): (?P<xid>48|6[1-4]|74|79|92|9[45]|119|12[01]|14[03]|154)\b(?P<what>.*)",
        "the node's driver reported Xid {xid} on {where}: the card, its link or its memory failed",
        "Look at the card on the node (`dmesg`, `nvidia-smi -q`); after Xid 79, 48, 63 or 64 reset it or reboot "
        "the node.",
        (Cited("NVRM: Xid", "kernel"),),
        kernel=True,
    ),
    Entry(
        "host out of memory",
        # Only of our own units: the node's kernel tells of every guest.
        r"oom-kill:\S*task_memcg=\S*servelab[^,]*,task=(?P<what>[^,]+),pid=(?P<pid>\d+)",
        "the kernel's OOM killer ended {what}: the guest ran out of main memory, not of GPU memory",
        "Give the guest more memory, or load less into it: no host KV cache (hierarchical cache), fewer load threads.",
        (Cited("oom-kill:constraint=CONSTRAINT_MEMCG", "kernel"),),
        kernel=True,
    ),
    Entry(
        "usage",
        r"^\S*.*?: error: (?P<what>(?:unrecognized arguments|ambiguous option|the following arguments are required"
        r"|argument \S+|expected ).*)$",
        "the server refused its command line ({what}); nothing was started",
        "Correct the mode's args; `servelab.sglang.sglang_flags` checks them against the installed release.",
        (
            Cited("unrecognized arguments: %s", "stdlib"),
            Cited("ambiguous option: %(option)s could match %(matches)s", "stdlib"),
            Cited("the following arguments are required: %s", "stdlib"),
        ),
    ),
    Entry(
        "port in use",
        r"\[Errno 98\].*\(['\"](?P<host>[^'\"]+)['\"], (?P<port>\d+)(?:, \d+, \d+)?\)",
        "port {port} on {host} belongs to another process",
        "Stop that process (`ss -ltnp sport = :{port}` names it) or choose another sglang_server_port.",
        (Cited("error while attempting ", "stdlib"), Cited("address already in use", "log")),
    ),
    Entry(
        "port in use",
        r"(?P<what>Port is already in use\. .*|EADDRINUSE.*)",
        "a port for the ranks' own talk belongs to another process: {what}",
        "Stop what is left of an earlier server (playbooks/clean.yml), or set nccl_port (several guests meet "
        "at sglang_server_dist_port).",
        (Cited("Port is already in use."), Cited("EADDRINUSE", "log")),
    ),
    Entry(
        "missing ranks",
        r"DistStoreError: Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<what>\d+/\d+) clients",
        "only {what} ranks came within {seconds} s to where they meet: the server of another guest did not start, or "
        "cannot reach this one",
        "Read the other ranks' logs; sglang_server_dist_address of the first guest and sglang_server_dist_port must be "
        "reachable from the others.",
        (Cited("seconds waiting for clients.", "log"),),
    ),
    Entry(
        "head not reached",
        r"DistNetworkError: The client socket has timed out after \d+ms while trying to connect to \((?P<what>[^)]+)\)",
        "the guest where the ranks meet was not reached at ({what})",
        "Read the first guest's log; sglang_server_dist_address of it and sglang_server_dist_port must be reachable "
        "from here.",
        (Cited("The client socket has timed out after", "log"),),
    ),
    Entry(
        "wrong interface",
        r"(?P<what>Gloo connectFullMesh failed.*|Unable to find address for: \S+)",
        "the ranks of several guests cannot connect to each other: {what}",
        "Set sglang_server_dist_interface to the network interface by which the guests reach each other "
        "(NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME follow it).",
        (Cited("Unable to find address for: ", "log"),),
    ),
    Entry(
        "GPU lost",
        r"CUDA error: (?P<what>uncorrectable ECC error encountered|unspecified launch failure|unknown error"
        r"|hardware stack error|.*fallen off the bus).*",
        "a GPU failed while it computed: {what}",
        "Look for an Xid in the node's kernel log (`dmesg` there) and at `nvidia-smi -q`; reset the card or reboot "
        "the node.",
        (Cited("uncorrectable ECC error encountered", _CUDART), Cited("unspecified launch failure", _CUDART)),
    ),
    Entry(
        "driver too old",
        r"(?P<what>CUDA driver version is insufficient for CUDA runtime version"
        r"|the provided PTX was compiled with an unsupported toolchain|forward compatibility was attempted[^.\n]*)",
        "the NVIDIA driver is too old for the installed CUDA: {what}",
        "Update the driver on the node and the user space in the guest to the same release; CUDA 13 needs 580 or "
        "newer.",
        (
            Cited("CUDA driver version is insufficient for CUDA runtime version", _CUDART),
            Cited("the provided PTX was compiled with an unsupported toolchain", _CUDART),
        ),
    ),
    Entry(
        "no GPU",
        r"(?P<what>No CUDA GPUs are available|no CUDA-capable device is detected|system not yet initialized"
        r"|CUDA error: initialization error|No accelerator.*available.*)",
        "CUDA finds no usable GPU: {what}",
        "Compare `nvidia-smi` and `ls -l /dev/nvidia*` on node and guest; after a boot of the node nvidia-uvm may "
        "be missing.",
        (Cited("no CUDA-capable device is detected", _CUDART), Cited("system not yet initialized", _CUDART)),
    ),
    Entry(
        "too few GPUs",
        r"(?P<what>invalid device ordinal.*)",
        "the mode asks for more GPUs than the guest has",
        "Lower sglang_server_tp_size, or pass more GPUs to the guest.",
        (Cited("invalid device ordinal", _CUDART),),
    ),
    Entry(
        "unsupported architecture",
        r"(?P<what>requires SM90 or SM10X NVIDIA GPUs|no kernel image is available for execution on the device"
        r"|The quantization method .* is not supported for the current GPU.*"
        r"|ptxas fatal.*Value 'sm_\w+' is not defined for option 'gpu-name'.*)",
        "the GPUs are not ones that this code was built for: {what}",
        "Choose another way for these cards (attention backend, all-reduce, quantisation), or a release with "
        "kernels for them.",
        (
            Cited("requires SM90 or SM10X", since="0.5.14"),
            Cited("is not supported for the current GPU. "),
            Cited("no kernel image is available for execution on the device", _CUDART),
        ),
    ),
    Entry(
        "KV pool too small",
        r"(?P<what>leave no GPU memory for the KV cache.*"
        r"|Not enough memory\. Please try to increase --mem-fraction-static.*"
        r"|(?:Prefill|Decode) out of memory\. Try to lower your batch size.*)",
        "no GPU memory is left for the KV cache",
        "Raise sglang_server_mem_fraction_static{raised}, or make room: fewer tokens of context, a smaller draft, "
        "more GPUs.",
        (
            Cited("leave no GPU memory for the KV cache", since="0.5.14"),
            Cited("Not enough memory. Please try to increase --mem-fraction-static."),
            Cited("Prefill out of memory. Try to lower your batch size."),
        ),
    ),
    Entry(
        "GPUs occupied",
        r"Error: (?P<what>The memory capacity is unbalanced.*)",
        "some GPUs are occupied by other processes: their free memory differs",
        "Find and release the holders (playbooks/clean.yml), then start again.",
        (Cited("The memory capacity is unbalanced"),),
    ),
    Entry(
        "out of memory at graph capture",
        r"(?P<what>Capture cuda graph failed: .*out of memory.*)",
        "out of GPU memory while CUDA graphs were captured",
        "Lower sglang_server_mem_fraction_static{lowered}, or capture less: a smaller "
        "sglang_server_cuda_graph_max_bs{halved}.",
        (Cited("Capture cuda graph failed: "),),
    ),
    Entry(
        "out of memory at graph capture",
        _OOM,
        "out of GPU memory while CUDA graphs were captured",
        "Lower sglang_server_mem_fraction_static{lowered}, or capture less: a smaller "
        "sglang_server_cuda_graph_max_bs{halved}.",
        _OOM_CITED,
        frozenset({"capturing CUDA graphs", "warming up"}),
    ),
    Entry(
        "out of memory at the KV pool",
        _OOM,
        "out of GPU memory while the KV cache was allocated: less is free than the memory fraction promises",
        "Lower sglang_server_mem_fraction_static{lowered}; something outside the pools (all-reduce buffers, "
        "another process) "
        "holds what it counts on.",
        _OOM_CITED,
        frozenset({"allocating the KV cache"}),
    ),
    Entry(
        "out of memory at weights",
        _OOM,
        "out of GPU memory while the weights were loaded",
        "The weights do not fit: check that the GPUs are free, use more GPUs (sglang_server_tp_size{doubled}) or a "
        "smaller "
        "quantisation; the memory fraction does not matter here.",
        _OOM_CITED,
        frozenset({"loading weights", "joining ranks", "importing", "starting"}),
    ),
    Entry(
        "out of memory while serving",
        _OOM,
        "out of GPU memory while requests were served",
        "Lower sglang_server_mem_fraction_static{lowered}: what is not in the pools is needed for activations.",
        _OOM_CITED,
    ),
    Entry(
        "host out of memory",
        r"(?P<what>Not enough host memory available\. .*|DefaultCPUAllocator: can't allocate memory.*"
        r"|(?:OSError|RuntimeError): .*(?:unable to allocate shared memory|No space left on device: .*/dev/shm).*)",
        "the guest ran out of main memory, not of GPU memory: {what}",
        "Give the guest more memory (and /dev/shm), or lower the host's KV cache (hierarchical cache).",
        (Cited("Not enough host memory available. Requesting "),),
    ),
    Entry(
        "kernel does not fit the GPU",
        r"OutOfResources: out of resource: shared memory, (?P<what>Required: \d+, Hardware limit: \d+)",
        "kernel needs more shared memory than sm_120 has",
        "Choose another attention backend, or a release whose kernel fits (Triton extend attention: 0.5.9 or newer).",
        (Cited("out of resource: shared memory", "log"),),
    ),
    Entry(
        "missing toolchain",
        r"(?P<what>Could not find nvcc and default.*|Ninja is required to load C\+\+ extensions.*"
        r"|No such file or directory: '(?:[^']*/)?(?:nvcc|ninja|ptxas|g\+\+|gcc)'.*|Cannot find ptxas.*"
        r"|CUDA_HOME environment variable is not set.*|Could not find CUDA installation\. Please set CUDA_HOME.*"
        r"|Failed to find C compiler.*)",
        "a compiler that kernels are built with at the start is missing: {what}",
        "Run playbooks/guest.yml (role cuda_toolkit) and see that the unit's CUDA_HOME and PATH point at it.",
        (
            Cited("Could not find nvcc and default", "flashinfer-python"),
            Cited("Could not find CUDA installation. Please set CUDA_HOME environment variable.", "apache-tvm-ffi"),
        ),
    ),
    Entry(
        "compilation failed",
        r"(?P<what>Ninja build failed\..*|PTXAS error.*|ninja: build stopped.*|nvcc fatal.*|ptxas fatal.*)",
        "a kernel that is built at the start does not compile: {what}",
        "Compare nvcc with torch's CUDA release, and remove the cache of kernels in the service user's home.",
        (Cited("Ninja build failed.", "flashinfer-python"),),
    ),
    Entry(
        "wheel mismatch",
        r"(?P<what>(?<!\S)\S+ is installed with version \S+, which is less than the minimum required version \S+"
        r"|(?<!\S)\S+ with minimum required version \S+ is not installed|undefined symbol: \S+"
        r"|(?:ImportError|OSError): lib\S+\.so\S*: cannot open shared object file.*"
        r"|(?:ImportError|ModuleNotFoundError): (?:No module named|cannot import name) .*)",
        "the installed packages do not belong together: {what}",
        "Reinstall the stack as it is locked (playbooks/guest.yml, role sglang_env); do not mix CUDA 12 and 13 wheels.",
        (
            Cited("is less than the minimum required version"),
            Cited("with minimum required version"),
        ),
    ),
    Entry(
        "draft model mismatch",
        r"(?P<what>does not implement set_eagle3_layers_to_capture.*|has no attribute 'set_eagle3_layers_to_capture'.*"
        r"|Unknown speculative algorithm name.*"
        r"|the draft vocab .*!= target vocab.*|Attempted to load weight \(.*\) into parameter \(.*\))",
        "target and draft model do not fit each other, or this release cannot speculate with them: {what}",
        "Take the draft that was trained for exactly this model (docs/modes.md), or leave speculation out.",
        (
            Cited("set_eagle3_layers_to_capture"),
            Cited("Attempted to load weight"),
        ),
    ),
    Entry(
        "trust_remote_code",
        r"(?P<what>(?:contains custom code|requires you to execute the (?:configuration|model) "
        r"file|consider setting `trust_remote_code=True`).*)",
        "the model brings code of its own, and running it was not allowed",
        "Read that code at the pinned revision; then set sglang_server_trust_remote_code (with a service user "
        "other than root).",
        (Cited("consider setting `trust_remote_code=True`"),),
    ),
    Entry(
        "tokenizer",
        r"(?P<what>Can't load tokenizer for .*|Couldn't instantiate the backend tokenizer.*|Failed to load the "
        r"tokenizer.*"
        r"|No such file or directory: '[^']*tokenizer[^']*'.*)",
        "the model's tokenizer cannot be loaded: {what}",
        "Check that tokenizer.json and tokenizer_config.json lie beside the weights and sglang_server_user may "
        "read them.",
        (
            Cited("Can't load tokenizer for", "transformers"),
            Cited("Couldn't instantiate the backend tokenizer", "transformers"),
            Cited("Failed to load the tokenizer."),
        ),
    ),
    Entry(
        "missing shard",
        r"(?P<what>Cannot find any model weights with .*|SafetensorError: .*|Error while deserializing header.*"
        r"|No such file or directory: '?\S*\.(?:safetensors|bin)\b.*)",
        "the model's weights are missing or incomplete: {what}",
        "Compare the directory with the model's index file and its sizes, and fetch what is missing.",
        (Cited("Cannot find any model weights with `"),),
    ),
    Entry(
        "unsupported model",
        r"(?P<what>Model architectures .* are not supported for now.*"
        r"|Transformers does not recognize this architecture.*)",
        "this release does not know the model's architecture: {what}",
        "Take a release that has it, or another model.",
        (
            Cited("are not supported for now. "),
            Cited("but Transformers does not recognize this architecture", "transformers"),
        ),
    ),
    Entry(
        "missing model",
        r"(?P<what>Repo id must be in the form.*"
        r"|(?<!\S)\S+ does not appear to have a file named (?!generation_config).*"
        r"|No such file or directory: '[^']*(?<!generation_)config\.json'.*"
        r"|Unrecognized model in .*|Can't load the configuration.*|We couldn't connect to .* to load the files.*"
        r"|Cannot find the requested files in the disk cache.*|(?:Repository Not Found|Cannot access gated repo) "
        r"for url.*)",
        "the model (or its draft) is not where the mode says: {what}",
        "Check sglang_server_model_path, sglang_server_draft_model_path and whether sglang_server_user may read them.",
        (
            Cited("Repo id must be in the form 'repo_name' or 'namespace/repo_name':", "huggingface-hub"),
            Cited("does not appear to have a file named", "transformers"),
            Cited("Can't load the configuration of", "transformers"),
        ),
    ),
    Entry(
        "model file not readable",
        r"(?P<what>PermissionError: .*)",
        "the service user may not read or write something: {what}",
        "Give sglang_server_user the right to it; weights must be readable, and only its home is written.",
        (Cited("PermissionError", "stdlib"),),
    ),
    Entry(
        "NCCL",
        r"(?P<what>NCCL error: .*|ncclUnhandledCudaError.*|ncclSystemError.*|Watchdog caught collective "
        r"operation timeout.*)",
        "NCCL failed: {what}",
        "Check that the GPUs are free and that P2P works (NCCL_DEBUG=INFO in the mode's env says more).",
        (Cited("NCCL error: "),),
    ),
    Entry(
        "watchdog",
        r"(?P<what>watchdog timeout \((?!.*soft=True).*)",
        "the scheduler did nothing for its watchdog's time: a rank hangs, most often in an all-reduce or in a "
        "compilation",
        "Try NCCL_P2P_DISABLE=1 in the mode's env; if that helps, correct IOMMU and ACS on the node "
        "(playbooks/provision.yml "
        "audits both). A longer watchdog_timeout only helps what is slow.",
        (Cited("watchdog timeout "),),
    ),
    Entry(
        "assertion",
        r"^(?:\[\S+ \S+\] )?AssertionError(?:: (?P<what>.*))?$",
        "SGLang refused this combination of settings by an assertion{colon}",
        "Read the assertion: it names the setting; correct the mode's args or take a release that allows it.",
        (Cited("Scheduler hit an exception: "),),
    ),
)

NOTICES: tuple[Notice, ...] = (
    Notice(
        "fell back to NCCL",
        r"Setup Custom allreduce failed with.*|no pcie_ipc_comm; falling back to NCCL.*|FlashInfer PCIe-IPC .*failed.*",
        "the all-reduce that was asked for could not be set up; the server goes on with NCCL",
        (Cited("Setup Custom allreduce failed"), Cited("FlashInfer PCIe-IPC", since="0.5.21")),
    ),
    Notice(
        "custom all-reduce disabled",
        r"is disabled because it's not supported on",
        "SGLang's own all-reduce is not used on cards without NVLink; NCCL does the work",
        (Cited("is disabled because it's not supported on"),),
    ),
    Notice(
        "adaptive speculation disabled",
        r"speculative_adaptive disabled: ",
        "drafts do not follow the batch: the mode's fixed number of steps is used",
        (Cited("speculative_adaptive disabled: ", since="0.5.11"),),
    ),
    Notice(
        "KV pool full",
        r"KV cache pool is full\. Retract requests\.",
        "requests were thrown out of the KV cache and computed again: fewer at a time, or a larger pool",
        (Cited("KV cache pool is full. Retract requests."),),
    ),
    Notice(
        "soft watchdog",
        r"watchdog timeout \(.*soft=True",
        "a step took longer than the soft watchdog allows; the server goes on",
        (Cited("watchdog timeout "),),
    ),
)
