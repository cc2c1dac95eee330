"""Timelines: the work of ranks over some seconds, as a file to open in Perfetto (`pdbus record`, `pdbus
replay --timeline`).

`facts` has the shape of what is recorded, `live` records it of a live cluster, `trace_events` makes trace events of it,
`output` writes the file.
"""
