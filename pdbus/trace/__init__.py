"""The life of one request, hop by hop (`pdbus trace`): `waterfall` orders and draws the events that the parts
recorded."""
