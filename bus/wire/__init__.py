"""The wire: messages, their codec, topics, hashes. Opens no socket."""
