"""What an engine embeds: publications of a rank, and finding rooms; each a thread over a pure core."""
