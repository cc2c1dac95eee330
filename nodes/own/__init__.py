"""Our own implementation of a rank (what runs the legs of requests): scheduler, blocks, KV transfer and engines."""
