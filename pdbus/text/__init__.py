"""Text and token ids of each model, for the client library, the HTTP edge and the command line: tokenizers, chat
templates, decoders of streams, stop strings."""
