"""Campaigns: several modes measured interleaved and repeated, so that their comparison can be believed.

`spec` reads what is wanted, `plan` orders it, `state` remembers what is done, `learn` concludes from it, and `drive`
does the rest through `runner`, which is the only part that knows Ansible; `orphans` ends what a killed campaign left.
"""
