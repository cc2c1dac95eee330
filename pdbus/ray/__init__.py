"""A cluster's parts over the machines of a Ray cluster (`pdbus up --ray`; docs/ray.md is for its operator).

`plan` says what goes where and is pure; `host` runs one part on one machine and knows nothing of Ray. Ray is imported
in `actors` and `cluster` alone.
"""
