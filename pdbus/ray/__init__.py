"""Runs a cluster's parts on the machines of a Ray cluster (`pdbus up --ray`; docs/ray.md is for its operator).

`plan` decides the placement and is pure; `host` runs one part on one machine and does not know Ray. Only `actors` and
`cluster` import Ray.
"""
