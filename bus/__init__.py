"""The bus: messages, sockets, publications and the bootstrap broker. Knows neither nodes nor controller."""
