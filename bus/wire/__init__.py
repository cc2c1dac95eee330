"""The wire: what is sent between parts. It has the messages, their codec, topics, hashes and failure codes, and opens
no socket."""
