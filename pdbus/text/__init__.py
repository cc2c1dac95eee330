"""Text and token ids of models, for the client library, the HTTP edge and the command line: tokenizers, chat templates,
decoders of streams, stop strings."""
