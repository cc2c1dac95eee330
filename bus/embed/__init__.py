"""The two parts that an engine embeds: a rank's publications, and the look-up of rooms. Each is a thread over a pure
core.
"""
