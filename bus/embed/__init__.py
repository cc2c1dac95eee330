"""The two parts that an engine embeds: the publications of a rank, and the look-up of rooms. Each is a thread over a
pure core."""
