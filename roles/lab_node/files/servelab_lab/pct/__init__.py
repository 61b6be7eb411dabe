"""A double of Proxmox VE's `pct`: its options, formats, refusals and configuration files, over real LXC.

Held against output captured from the real tool (pve-container 6.1). Exit statuses other than 0 carry no meaning there
(they leak errno), so every refusal exits with 255 here; `exec` passes the command's own status on.
"""
