"""The life of one request, hop by hop (`pdbus trace`)."""
