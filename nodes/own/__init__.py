"""Our own implementation of a rank: scheduler, blocks, KV transfer and engines."""
